// The end of a source: what runs KERNEL over a grid.

extern "C" const char* emulate(const unsigned* grid, unsigned threads, bool dependent, const void* arguments) {
  using namespace emulator;
  emulator::threads = threads;
  emulator::dependent = dependent;
  emulator::arguments = arguments;
  body = [](const void* with) { KERNEL(*static_cast<const Arguments*>(with)); };
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads, 1, 1};
  failure.clear();
  for (unsigned z = 0; z < grid[2]; ++z) {
    for (unsigned y = 0; y < grid[1]; ++y) {
      for (unsigned x = 0; x < grid[0]; ++x) {
        blockIdx = {x, y, z};
        run_cta();
        if (!failure.empty()) {
          failure = "CTA (" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + "), " + failure;
          return failure.c_str();
        }
      }
    }
  }
  // A predecessor has ended by now.
  for (const Late& part : late) std::memcpy(part.at, part.after, part.bytes);
  return nullptr;
}
