// Programmatic dependent launch (sm_90): the blocks of a kernel that launch_overlapping_cluster() starts may
// begin while the kernel before it in the stream still runs, and take over each multiprocessor as that leaves
// it. The latency of the launch and the set-up of barriers disappear behind the other kernel's end.
#pragma once

namespace htree::device {

// Every thread, before it reads or writes global memory: returns when all kernels before this one have
// completed and what they wrote is visible. Kernel arguments, tensor copy descriptors among them, may be read
// before. Returns at once in a kernel that was launched without the attribute.
__device__ __forceinline__ void wait_for_previous_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// One thread of each block: once all blocks have said so, or have left, the next kernel's blocks may begin,
// where multiprocessors have room for them. It must wait for this kernel with the function above.
__device__ __forceinline__ void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace htree::device
