/* A PyTorch process on a simulated device: what it loads, calls and gives back, and what was live at its peak, by name.
 *
 *   hold, copy, release, call -> steps of one trace, the script, which are played as they come
 *   the step at which most was allocated, or at which the peak was reset -> the script up to there -> who was live
 *   the script, other workspaces -> what the same process would have reserved
 *   counters at the end of a phase, and the work that was counted in it -> a reading
 *
 * The allocator counts bytes; the script remembers who took them. Equal names are one line of an answer. */
#ifndef VM_PROCESS_H
#define VM_PROCESS_H

#include "torch_trace.h"

typedef enum vm_cublaslt { VM_CUBLASLT_EACH, VM_CUBLASLT_KEPT, VM_CUBLASLT_SHARED } vm_cublaslt;

/* cuBLAS's and cuBLASLt's workspaces, as PyTorch takes them. */
typedef struct vm_process_blas {
    uint64_t cublas_bytes, cublaslt_bytes;
    vm_cublaslt cublaslt_use; /* taken by each call, kept by the first, or cuBLAS's own */
} vm_process_blas;

typedef struct vm_process vm_process;

/* talloc: borrowed until vm_process_free. */
vm_status vm_process_new(vm_talloc *talloc, const vm_process_blas *blas, vm_process **out);
void vm_process_free(vm_process *p); /* accepts NULL */

/* All that changes the process fails with VM_ENOMEM if the simulated device is full, and then vm_process_last_oom has
 * the figures, or if this machine has no memory. What the failed call took is given back. */
const vm_talloc_oom *vm_process_last_oom(const vm_process *p); /* NULL unless the last call failed so */

/* Takes a storage of each size under a name, all or none: its address is 0 for 0 bytes. stamp: the name in the
 * allocator's history. */
vm_status vm_process_hold(vm_process *p, const char *stamp, const char *name, const uint64_t *bytes, size_t count,
                          uint64_t *address);
/* Copies each storage into a new one of so many bytes, under its own name, and gives the old one back: address[i]
 * becomes the new one's; one for which 0 bytes are said stays as it is. Where one cannot be had, *copied says how many
 * were gone through, and these stay so. */
vm_status vm_process_copy(vm_process *p, const char *stamp, uint64_t *address, const uint64_t *bytes, size_t count,
                          size_t *copied);
/* VM_EINVAL where nothing of the process lies at address. */
vm_status vm_process_release(vm_process *p, uint64_t address);
/* torch.cuda.empty_cache */
vm_status vm_process_empty_cache(vm_process *p);

/* Plays a trace. workspace, next: [t->convs], what each convolution takes, and where that cannot be had, since cuDNN
 * has other plans; PyTorch's cache of plans keeps to the one that ran. address: [t->ids], out: of each storage that is
 * left, 0 for the others; allocated, reserved: [t->steps], out: bytes at the height of each step. */
vm_status vm_process_call(vm_process *p, const vm_trace *t, const uint64_t *workspace, const uint64_t *next,
                          uint64_t *address, uint64_t *allocated, uint64_t *reserved);
/* How many convolutions could not have their workspace so far. */
size_t vm_process_refused(const vm_process *p);

/* ---- phases ---- */

/* Each count stops at UINT64_MAX. */
typedef struct vm_work {
    uint64_t flops;      /* on the device */
    uint64_t attended;   /* of them, in fused attentions */
    uint64_t moved;      /* bytes that are read and written in the device's memory */
    uint64_t sent;       /* bytes of weights that are sent to the device */
    uint64_t host_flops; /* on the host */
} vm_work;

/* Steps of the script: those before `until`, from `since` on. */
typedef struct vm_process_span {
    size_t since, until;
} vm_process_span;

/* A phase. Its peak is that of the steps since the peak was reset; its work is that since the reading before. */
typedef struct vm_reading {
    vm_process_span span;
    uint64_t base_allocated, base_reserved, peak_allocated, peak_reserved; /* bytes at the reset, and at the peak */
    uint64_t outside; /* bytes that the program held of the device besides PyTorch's */
    uint32_t name;    /* one of the script's names */
    vm_work work;
} vm_reading;

/* torch.cuda.reset_peak_memory_stats: the storages that are live now are the baseline. */
vm_status vm_process_reset_peak(vm_process *p);
/* Adds work to the phase. outside: bytes of the device that the program holds besides PyTorch's until the phase ends;
 * the most that was said counts. */
void vm_process_count(vm_process *p, const vm_work *work, uint64_t outside);
/* Multiplies work that is counted from now on: one played step of a loop stands for `times` steps. */
void vm_process_times(vm_process *p, uint64_t times);
/* Ends the phase: reads the counters, and keeps the reading under a name. */
vm_status vm_process_read(vm_process *p, const char *name);
/* Borrowed until the next call. */
const vm_reading *vm_process_readings(const vm_process *p, size_t *count);
/* The most bytes that were reserved since the process began. */
uint64_t vm_process_most_reserved(const vm_process *p);

/* ---- the same again on another device (process_replay.c) ---- */

/* Does on p, which is new, all that `from` did, call by call: next plans and calls whose steps depend on the free
 * memory are chosen anew. first_only: next plans are taken to want what the first ones want. Fails as the call fails
 * that p has no memory for. */
vm_status vm_process_replay(vm_process *p, const vm_process *from, bool first_only);

/* Finds the smallest device, in pages of 2 MiB, with room for the replay and for the memory outside PyTorch. low: too
 * few bytes; high: enough bytes, as far as is known. If the replay succeeds on some device and fails on a larger one,
 * there are several borders, and the search finds one of them. */
vm_status vm_process_least(const vm_process *p, bool first_only, uint64_t low, uint64_t high, uint64_t *least);

/* ---- what happened ---- */

/* All steps so far, with names and convolutions of its own; the allocator's tags are its names. Borrowed until the next
 * call. */
const vm_trace *vm_process_script(const vm_process *p);

/* The most that the same steps would have reserved in each span, on fresh allocators like the process's; with `above`
 * beyond what was reserved before the span. workspace: [rows][script->convs], overwritten; most: [rows][spans], out.
 * Rows that would make the same segments are played once. */
vm_status vm_process_again(const vm_process *p, const vm_process_span *span, size_t spans, bool above,
                           uint64_t *workspace, size_t rows, uint64_t *most);

typedef struct vm_process_named {
    uint32_t name;
    uint64_t bytes;   /* as requested */
    uint64_t rounded; /* bytes that the allocator gave beyond the requests when vm_process_hold took storages of that
                         name, by the end of the phase; those before there were none of it do not count */
} vm_process_named;

/* Storages that were live at once, by name, in the order in which each name came first. */
typedef struct vm_process_list {
    size_t count;
    vm_process_named *item;
} vm_process_list;

/* At the peak of a reading, or since the last reset if there is no such reading. *step: the call's step that makes it,
 * or NULL where the peak lies outside of calls, borrowed until the next call. The list is the caller's on success, its
 * items scratch. */
vm_status vm_process_peak(const vm_process *p, size_t reading, vm_process_list *out, const vm_trace_step **step);
/* When the peak was reset. */
vm_status vm_process_baseline(const vm_process *p, vm_process_list *out);

/* 0 where nothing of the process lies at address. */
uint64_t vm_process_bytes_at(vm_process *p, uint64_t address);

#endif
