// Programmatic dependent launch, PDL (sm_90). The blocks of a kernel launched with LaunchShape::pdl may begin
// while the kernel before it in the stream still runs; they take over each multiprocessor as that kernel
// leaves it. So the latency of the launch and the set-up of barriers hide behind the end of the other kernel.
// Code for other devices ignores the calls.
#pragma once

namespace htree::device {

// Every thread calls it before it reads or writes global memory. It returns when all kernels before this one
// have completed and what they wrote is visible, and at once in a kernel that was launched without
// `pdl`. Kernel arguments, tensor copy descriptors among them, may be read before.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// At least one thread of each block calls it. Once all blocks have called it or ended, blocks of the next kernel may
// begin where multiprocessors have space for them. That kernel must wait for this one by the function above.
__device__ __forceinline__ void pdl_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Both, for every thread of a block, once what it prepares is done. Where `pdl` is false, neither: a kernel whose
// large launches do without PDL may lose by the calls (rmsnorm_rope 2 %).
__device__ __forceinline__ void pdl_launch_and_wait(bool pdl = true) {
  if (pdl) {
    if (threadIdx.x == 0) {
      pdl_launch_dependents();
    }
    pdl_wait();
  }
}

}  // namespace htree::device
