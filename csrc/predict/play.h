/* Plays a script on a simulated device.
 *
 *   script, device, workspaces -> counters of each phase, tensors live at each peak, where memory ran out
 *   the same script on other devices, with other workspaces -> other plays
 *
 * What depends on the device's free memory is decided while playing: cuDNN's next plan if a workspace is refused, and
 * the steps of a trace with a walk. */
#ifndef VM_PLAY_H
#define VM_PLAY_H

#include "script.h"

typedef enum vm_cublaslt { VM_CUBLASLT_EACH, VM_CUBLASLT_KEPT, VM_CUBLASLT_SHARED } vm_cublaslt;

/* Sizes of cuBLAS's and cuBLASLt's workspaces, and how PyTorch uses them. */
typedef struct vm_blas {
    uint64_t cublas_bytes, cublaslt_bytes;
    vm_cublaslt cublaslt_use; /* allocated by each call, kept by the first, or shared with cuBLAS */
} vm_blas;

typedef struct vm_play vm_play;

/* script, talloc: borrowed until vm_play_free. memory: bytes of the device that the program sees, for walks; talloc may
 * have more. */
vm_status vm_play_new(const vm_script *script, vm_talloc *talloc, const vm_blas *blas, uint64_t memory, vm_play **out);
/* A new play of the same script with the same workspaces, on another device. talloc: NULL makes one like the other's
 * with `memory` bytes. first_only: assume that cuDNN's next plans need as much as its first ones. */
vm_status vm_play_elsewhere(const vm_play *like, vm_talloc *talloc, uint64_t memory, bool first_only, vm_play **out);
/* A new play that goes on where a play of one's own device stands, on a device of `memory` bytes. The device is plain
 * (vm_talloc_is_plain), none of its calls walked, and it has reserved no more than `memory`. */
vm_status vm_play_branch(const vm_play *p, uint64_t memory, vm_play **out);
void vm_play_free(vm_play *p); /* accepts NULL */

/* Sets the workspaces of the script's convolutions, in its order: of cuDNN's first plan, and of the next plan if the
 * first cannot be allocated. PyTorch caches the plan that ran. vm_play_answer_call: of the convolutions of a trace that
 * was called. */
vm_status vm_play_answer(vm_play *p, const uint64_t *workspace, const uint64_t *next);
vm_status vm_play_answer_call(vm_play *p, const vm_called *c, const uint64_t *workspace, const uint64_t *next);

/* Plays the events that were not played yet. VM_ENOMEM: the device is full (vm_play_oom has figures), or this machine
 * is out of memory. A failed event counts as played. A failed call frees its storages. A failed take keeps the first
 * *taken of its storages. */
vm_status vm_play_run(vm_play *p, size_t *taken);
/* Plays on with the events that reserved at most `bytes` in another play of the script with the same workspaces. */
vm_status vm_play_up_to(vm_play *p, const vm_play *like, uint64_t bytes);
/* Plays the event that was just written to its script, for scripts that are written while they are played. The script
 * forgets an event that fails. A take that fails frees its storages. */
vm_status vm_play_follow(vm_play *p, vm_script *script);
const vm_talloc_oom *vm_play_oom(const vm_play *p); /* NULL unless the last event filled the device */

/* The last call: its trace, and bytes at the height of each of its steps. Borrowed until the next call. */
typedef struct vm_heights {
    const vm_called *of;
    uint64_t *allocated, *reserved; /* [of->trace->steps] */
} vm_heights;
/* Notes the heights from now on, or no longer. */
void vm_play_note_heights(vm_play *p, bool notes);
const vm_heights *vm_play_heights(const vm_play *p);

const vm_script *vm_play_script(const vm_play *p);
const vm_talloc *vm_play_device(const vm_play *p);
/* Returns: whether a storage is there; one of 0 bytes never is. */
bool vm_play_has(const vm_play *p, uint32_t storage);
/* Returns: how many convolutions have been refused their workspace so far. */
size_t vm_play_refused(const vm_play *p);
/* Returns: the most bytes reserved since the play began. */
uint64_t vm_play_most_reserved(const vm_play *p);
/* Returns: whether a call's steps depended on the free memory. */
bool vm_play_walked(const vm_play *p);

/* Events [since, until) of the script. */
typedef struct vm_span {
    size_t since, until;
} vm_span;

/* Counters of a phase, in bytes: when its peak was reset, and at its peak. */
typedef struct vm_reading {
    vm_span span;
    uint64_t base_allocated, base_reserved, peak_allocated, peak_reserved;
} vm_reading;

/* Of each of the script's phases that was played. Borrowed until the next event. */
const vm_reading *vm_play_readings(const vm_play *p, size_t *count);

/* ---- who was live (play_live.c) ---- */

/* Storages of one name. rounded: bytes that the allocator added to those of takes until the end of the phase; it
 * restarts when none of them is left. */
typedef struct vm_live {
    uint32_t name;
    uint64_t bytes, rounded; /* bytes: as requested */
} vm_live;

/* Storages live at the same time, by name, in order of each name's first use. */
typedef struct vm_live_list {
    size_t count;
    vm_live *item;
} vm_live_list;

enum { VM_NO_NAME = UINT32_MAX };

/* At the peak of a reading, or since the last reset if there is no such reading. *step: the name of the call's step
 * that makes the peak, or VM_NO_NAME. Transfers the list on success; its items are scratch. */
vm_status vm_play_peak(const vm_play *p, size_t reading, vm_live_list *out, uint32_t *step);
/* When the peak was reset. */
vm_status vm_play_baseline(const vm_play *p, vm_live_list *out);

/* ---- other workspaces (play_rows.c) ---- */

/* The most that the same events would have reserved in each span, on fresh devices like the play's. above: count only
 * bytes beyond those reserved before the span. workspace: [rows][script->convs], overwritten; most: [rows][spans], out.
 * Rows that make the same segments are played once. */
vm_status vm_play_rows(const vm_play *p, const vm_span *span, size_t spans, bool above, uint64_t *workspace,
                       size_t rows, uint64_t *most);

#endif
