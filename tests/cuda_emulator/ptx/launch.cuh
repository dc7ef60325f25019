// Stands in for device/ptx/launch.cuh.

inline void wait_for_predecessor() { emulator::wait_for_predecessor(); }

inline void release_dependents() {}

inline unsigned cta_again() { return blockIdx.x; }
