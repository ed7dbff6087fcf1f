/* A PyTorch process on a simulated device: it loads, calls and frees, and names the tensors that are live at its peak.
 *
 *   hold, copy, release, call -> steps of one trace, the script, played at once
 *   the step at which most was allocated, or the peak was reset -> the script up to there -> live storages
 *   the script, other workspaces -> what the same process would have reserved
 *   counters at the end of a phase, and the work counted in it -> a reading
 *
 * The allocator counts bytes; the script remembers their names. Equal names are one line of an answer. */
#ifndef VM_PROCESS_H
#define VM_PROCESS_H

#include "torch_trace.h"

typedef enum vm_cublaslt { VM_CUBLASLT_EACH, VM_CUBLASLT_KEPT, VM_CUBLASLT_SHARED } vm_cublaslt;

/* Sizes of cuBLAS's and cuBLASLt's workspaces, and how PyTorch uses them. */
typedef struct vm_process_blas {
    uint64_t cublas_bytes, cublaslt_bytes;
    vm_cublaslt cublaslt_use; /* allocated by each call, kept by the first, or shared with cuBLAS */
} vm_process_blas;

typedef struct vm_process vm_process;

/* talloc: borrowed until vm_process_free. */
vm_status vm_process_new(vm_talloc *talloc, const vm_process_blas *blas, vm_process **out);
void vm_process_free(vm_process *p); /* accepts NULL */

/* Every function that changes the process returns VM_ENOMEM if the simulated device is full, and vm_process_last_oom
 * has the figures; or if this machine has no memory. A failed call frees what it allocated. */
const vm_talloc_oom *vm_process_last_oom(const vm_process *p); /* NULL unless the last call filled the device */

/* Allocates a storage of each size under one name, all or none. address: 0 for 0 bytes. stamp: the name in the
 * allocator's history. */
vm_status vm_process_hold(vm_process *p, const char *stamp, const char *name, const uint64_t *bytes, size_t count,
                          uint64_t *address);
/* Replaces each storage by a new one of bytes[i] bytes under its own name; address[i] becomes the new address. A size
 * of 0 leaves that storage unchanged. If an allocation fails, *copied says how many were replaced; those stay. */
vm_status vm_process_copy(vm_process *p, const char *stamp, uint64_t *address, const uint64_t *bytes, size_t count,
                          size_t *copied);
/* VM_EINVAL if the process has nothing at address. */
vm_status vm_process_release(vm_process *p, uint64_t address);
/* torch.cuda.empty_cache */
vm_status vm_process_empty_cache(vm_process *p);

/* Plays a trace. workspace, next: [t->convs], each convolution's workspace, and the one of cuDNN's next plan if the
 * first cannot be allocated; PyTorch caches the plan that ran. address: [t->ids], out: of each storage that stays, 0
 * for the others; allocated, reserved: [t->steps], out: bytes at the height of each step. */
vm_status vm_process_call(vm_process *p, const vm_trace *t, const uint64_t *workspace, const uint64_t *next,
                          uint64_t *address, uint64_t *allocated, uint64_t *reserved);
/* Returns: how many convolutions have been refused their workspace so far. */
size_t vm_process_refused(const vm_process *p);

/* ---- phases ---- */

/* Each count stops at UINT64_MAX. */
typedef struct vm_work {
    uint64_t flops;      /* on the device */
    uint64_t attended;   /* of flops: in fused attentions */
    uint64_t moved;      /* bytes read and written in the device's memory */
    uint64_t sent;       /* bytes of weights sent to the device */
    uint64_t host_flops; /* on the host */
} vm_work;

/* Steps [since, until) of the script. */
typedef struct vm_process_span {
    size_t since, until;
} vm_process_span;

/* A phase. Its peak counts from the last reset, its work from the reading before. */
typedef struct vm_reading {
    vm_process_span span;
    uint64_t base_allocated, base_reserved, peak_allocated, peak_reserved; /* bytes at the reset, and at the peak */
    uint64_t outside; /* bytes of the device that the program held outside PyTorch */
    uint32_t name;    /* one of the script's names */
    vm_work work;
} vm_reading;

/* torch.cuda.reset_peak_memory_stats: the storages live now are the baseline. */
vm_status vm_process_reset_peak(vm_process *p);
/* Adds work to the phase. outside: bytes of the device that the program holds outside PyTorch until the phase ends; the
 * largest value counts. */
void vm_process_count(vm_process *p, const vm_work *work, uint64_t outside);
/* Multiplies work counted from now on: one played step of a loop stands for `times` steps. */
void vm_process_times(vm_process *p, uint64_t times);
/* Ends the phase: reads the counters and stores the reading under a name. */
vm_status vm_process_read(vm_process *p, const char *name);
/* Borrowed until the next call. */
const vm_reading *vm_process_readings(const vm_process *p, size_t *count);
/* Returns: the most bytes reserved since the process began. */
uint64_t vm_process_most_reserved(const vm_process *p);

/* ---- the same again on another device (process_replay.c) ---- */

/* Repeats on p, which is new, every call of `from`. It chooses next plans again, and walks calls again if their steps
 * depend on the free memory. first_only: next plans need as much as first plans. Fails like the call that does not
 * fit. */
vm_status vm_process_replay(vm_process *p, const vm_process *from, bool first_only);

/* Finds the smallest device, in pages of 2 MiB, with room for the replay and for the memory outside PyTorch. low: too
 * few bytes; high: enough bytes, as far as known. If the replay succeeds on some device and fails on a larger one,
 * there are several borders; the search finds one of them. */
vm_status vm_process_least(const vm_process *p, bool first_only, uint64_t low, uint64_t high, uint64_t *least);

/* ---- what happened ---- */

/* All steps so far, with names (the allocator's tags) and convolutions. Borrowed until the next call. */
const vm_trace *vm_process_script(const vm_process *p);

/* The most that the same steps would have reserved in each span, on fresh allocators like the process's. above: count
 * only bytes beyond those reserved before the span. workspace: [rows][script->convs], overwritten; most: [rows][spans],
 * out. Rows that make the same segments are played once. */
vm_status vm_process_again(const vm_process *p, const vm_process_span *span, size_t spans, bool above,
                           uint64_t *workspace, size_t rows, uint64_t *most);

/* Storages of one name. rounded: bytes that the allocator added to those of vm_process_hold until the end of the phase;
 * it restarts when none of them is left. */
typedef struct vm_process_named {
    uint32_t name;
    uint64_t bytes, rounded; /* bytes: as requested */
} vm_process_named;

/* Storages live at the same time, by name, in order of each name's first use. */
typedef struct vm_process_list {
    size_t count;
    vm_process_named *item;
} vm_process_list;

/* At the peak of a reading, or since the last reset if there is no such reading. *step: the call's step that makes the
 * peak, borrowed until the next call, or NULL. Transfers the list on success; its items are scratch. */
vm_status vm_process_peak(const vm_process *p, size_t reading, vm_process_list *out, const vm_trace_step **step);
/* When the peak was reset. */
vm_status vm_process_baseline(const vm_process *p, vm_process_list *out);

/* Returns: 0 if the process has nothing at address. */
uint64_t vm_process_bytes_at(vm_process *p, uint64_t address);

#endif
