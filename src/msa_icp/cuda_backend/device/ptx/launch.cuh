// Programmatic dependent launch. The first two do nothing in a launch without it.

// Every earlier kernel of the stream has ended, and what it wrote is there. Every thread, on every path, calls
// this before it ends: otherwise nothing orders the kernel after the next.
__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel's CTAs may take what places there are.
__device__ __forceinline__ void release_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// blockIdx.x, asked for again: what follows from it need not be kept in registers until then.
__device__ __forceinline__ unsigned cta_again() {
  unsigned index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}
