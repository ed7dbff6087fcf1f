/* A PyTorch process on a simulated device: what it loads, calls and gives back, and what was live at its peak, by name.
 *
 *   hold, place, call, copy -> storages, each with a tag     tag -> name: of a holder, or of a step of a trace
 *   whatever takes memory   -> is this the most so far? then who is live now is kept, for vm_process_peak
 *
 * The allocator counts; this remembers who. Names are the caller's own, so that equal names are one line of an answer.
 * Storages are listed in the order in which they were taken. */
#ifndef VM_PROCESS_H
#define VM_PROCESS_H

#include "torch_trace.h"

/* cuBLAS's and cuBLASLt's workspaces, as PyTorch takes them. */
typedef struct vm_process_blas {
    uint64_t cublas_bytes, cublaslt_bytes;
    vm_cublaslt cublaslt_use;
} vm_process_blas;

typedef struct vm_process vm_process;

/* talloc: borrowed until vm_process_free. */
vm_status vm_process_new(vm_talloc *talloc, const vm_process_blas *blas, vm_process **out);
void vm_process_free(vm_process *p); /* accepts NULL */

/* All that follows fails with VM_ENOMEM where the simulated device is full, and then vm_process_last_oom has the
 * figures, or where this machine has no memory. What the failed call took is given back. */
const vm_talloc_oom *vm_process_last_oom(const vm_process *p); /* NULL unless the last call failed so */

/* Takes a storage of each size under a name, all or none: its address is 0 for 0 bytes. Or each storage that a trace
 * takes, which gives nothing back (address: [t->ids]). stamp: the name in the allocator's history. */
vm_status vm_process_hold(vm_process *p, const char *name, const uint64_t *bytes, size_t count, uint64_t *address);
vm_status vm_process_place(vm_process *p, const char *stamp, const char *name, const vm_trace *t, uint64_t *address);
/* Copies each storage into a new one of so many bytes, under its own name, and gives the old one back: address[i]
 * becomes the new one's. Where one cannot be had, *done says how many were copied, and these stay so. */
vm_status vm_process_copy(vm_process *p, const char *stamp, uint64_t *address, const uint64_t *bytes, size_t count,
                          size_t *done);
/* VM_EINVAL where nothing of the process lies at address. */
vm_status vm_process_release(vm_process *p, uint64_t address);

/* Plays a trace, which is borrowed until vm_process_free, since its names are asked for later. workspace:
 * [t->convs], in, out, and next: [t->convs] as vm_trace_process has them; address: [t->ids], out: of each storage
 * that is left, 0 for the others; allocated, reserved: [t->steps], out: bytes at the height of each step. */
vm_status vm_process_call(vm_process *p, const vm_trace *t, uint64_t *workspace, const uint64_t *next,
                          uint64_t *address, uint64_t *allocated, uint64_t *reserved);

/* torch.cuda.reset_peak_memory_stats: what is live now is the baseline. */
vm_status vm_process_reset_peak(vm_process *p);

/* ---- what happened ---- */

typedef struct vm_process_named {
    uint32_t tag;   /* of the first that has this name */
    uint64_t bytes; /* as requested */
} vm_process_named;

/* Storages that were live at once, by name, in the order in which each name came first. */
typedef struct vm_process_list {
    size_t count, room;
    vm_process_named *item;
} vm_process_list;
void vm_process_list_free(vm_process_list *list);

#define VM_PROCESS_NO_TAG UINT32_MAX

/* At the peak since the last reset. *step: the tag of the call's step that makes it, or VM_PROCESS_NO_TAG where the
 * peak lies outside of calls. The caller's on success. */
vm_status vm_process_peak(vm_process *p, vm_process_list *out, uint32_t *step);
/* When the peak was reset. */
vm_status vm_process_baseline(vm_process *p, vm_process_list *out);

/* Tags are 0 and up; the allocator's history and vm_talloc_oom have them too. NULL beyond vm_process_tags. */
uint32_t vm_process_tags(const vm_process *p);
const char *vm_process_name(const vm_process *p, uint32_t tag);
/* 0 where nothing of the process lies at address. */
uint64_t vm_process_bytes_at(const vm_process *p, uint64_t address);

#endif
