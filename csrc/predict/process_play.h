/* Inside a process (process.h): its state, and the player of its script. For process*.c only. */
#ifndef VM_PROCESS_PLAY_H
#define VM_PROCESS_PLAY_H

#include "process.h"

typedef struct storage {
    uint64_t address; /* 0: absent */
    uint64_t bytes;
    uint32_t rounded; /* bytes that the allocator added by rounding; 0 for storages of calls and copies */
    uint32_t name, stream;
} storage;

/* A cuBLAS workspace that PyTorch keeps. */
typedef struct kept {
    uint64_t address;
    size_t step;     /* of its first use */
    uint32_t before; /* storages numbered before that call */
    uint32_t name;
} kept;

/* Workspaces of a convolution: cuDNN's first plan, as its last call says; its next plan; and the most that it still
 * takes after a refusal (UINT64_MAX before). */
typedef struct workspaces {
    uint64_t first, next, most;
} workspaces;

/* One call on the process. Its steps are [from, until) of the script. */
typedef enum event_kind { EVENT_TAKE, EVENT_GIVE, EVENT_EMPTY, EVENT_CALL, EVENT_RESET, EVENT_READ } event_kind;
typedef struct event {
    event_kind kind;
    uint32_t stamp; /* of a take: the name in the allocator's history */
    size_t from, until;
    size_t reading;      /* its number */
    vm_trace_vae *again; /* of a call, owned: how to walk it again if its steps depend on the free memory; or NULL */
} event;

/* Where a peak lies: after `end` steps. If a call makes it, the call's steps begin at `call`; otherwise call equals
 * end. workspace: bytes of the last step's workspace, if that step is a convolution. */
typedef struct peak {
    size_t call, end;
    uint64_t workspace;
} peak;

enum { CUBLAS, CUBLASLT };
#define NEVER SIZE_MAX

struct vm_process {
    vm_talloc *talloc;
    vm_process_blas blas;
    vm_trace *script;
    storage *storage;       /* [script->ids] */
    workspaces *workspaces; /* [convs] */
    size_t convs, refused;  /* refused: how many of them were refused their workspace */
    bool first_only;        /* whether next plans need what the first ones need */
    event *event;           /* [events] */
    size_t events;
    kept kept[2];
    uint32_t found;               /* the storage found last */
    uint64_t most_reserved;       /* before the peak was reset */
    uint64_t allocated, reserved; /* bytes when the peak was reset, */
    size_t reset;                 /* and the steps before that */
    uint64_t peak_bytes;          /* the most bytes since then, */
    peak peak;                    /* and where that is */
    vm_work work;                 /* since the last reading, */
    uint64_t outside;             /* and bytes besides PyTorch's */
    uint64_t times;               /* that work counts */
    vm_reading *reading;          /* [readings], */
    peak *reading_peak;           /* and their peaks */
    size_t readings;
    bool full;         /* the last call filled the simulated device, */
    vm_talloc_oom oom; /* and these are its figures */
};

/* ---- process_play.c ---- */

/* State of a player. */
typedef struct run {
    vm_talloc *talloc;
    const vm_process_blas *blas;
    storage *storage;
    uint64_t *workspace, *next; /* [convs]; next: or NULL */
    kept kept[2];
    const uint32_t *stamp;          /* names in the allocator's history, or NULL: each step's own name */
    uint64_t *allocated, *reserved; /* of each step played, or NULL */
    size_t highest;                 /* the step with the greatest height */
} run;

uint64_t vm_play_now(const vm_talloc *a, vm_talloc_kind kind);
/* *height: allocated bytes at the step's height, including a workspace. */
vm_status vm_play_step(run *r, const vm_trace_step *step, uint64_t *height);
/* Plays the script's steps from *at to `until`; *at: the first that was not played. Skips a stretch if an earlier one
 * of its kind left the allocator as it is now: it would run the same way. */
vm_status vm_play(run *r, const vm_trace *script, size_t *at, size_t until);

/* ---- process.c, for process_replay.c ---- */

vm_status vm_process_give(vm_process *p, uint32_t id);
/* Allocates `count` storages, all or none. address: [count], out. */
vm_status vm_process_take(vm_process *p, uint32_t stamp, uint32_t name, const uint64_t *bytes, size_t count,
                          uint64_t *address);
/* Ends the phase under one of the script's names. */
vm_status vm_process_end(vm_process *p, uint32_t name);
/* Finds or adds the convolution: its number, and a place for its workspaces. */
vm_status vm_process_question(vm_process *p, const vm_conv *conv, uint32_t *number);
/* Adds a step to the script; a take's storage gets the next number. */
vm_status vm_process_push(vm_process *p, vm_trace_step step);
/* Copies the stretches among a trace's steps [from, until), which are the script's steps from `to` on. */
vm_status vm_process_note_stretches(vm_process *p, const vm_trace *t, size_t from, size_t until, size_t to);
/* Appends a trace's steps to the script. conv: [t->convs], out: the numbers of its convolutions in the script. */
vm_status vm_process_append(vm_process *p, const vm_trace *t, uint32_t *conv);
/* Plays the script's steps from number `from` on as one call. Its first storage has the number `first`. */
vm_status vm_process_run(vm_process *p, size_t from, uint32_t first, const vm_trace_vae *again, uint64_t *allocated,
                         uint64_t *reserved);

#endif
