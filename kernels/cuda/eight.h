/* Eight channels as they lie in memory. Kernels that wait for memory keep these, and turn them into floats once all
 * their loads are under way: half the registers, and no load waits for the one before it. */
#ifndef VM_EIGHT_H
#define VM_EIGHT_H

#include "device.h"

template <typename T>
struct vm_eight {
    uint4 words[sizeof(T) / 2];
};

template <typename T>
VM_DEVICE vm_eight<T> vm_take8(const T *p) {
    vm_eight<T> e;
#pragma unroll
    for (int i = 0; i < (int)sizeof(T) / 2; i++) e.words[i] = vm_load16(p + i * 16 / sizeof(T));
    return e;
}

template <typename T>
VM_DEVICE void vm_open8(float v[8], const vm_eight<T> &e) {
    vm_load8(v, reinterpret_cast<const T *>(e.words));
}

#endif
