/* Inside a play (play.h): its state, and the player of a call's steps. For play*.c only. */
#ifndef VM_PLAY_PARTS_H
#define VM_PLAY_PARTS_H

#include "play.h"

/* rounded: bytes that the allocator added by rounding; 0 for storages of calls, and in place of others. */
typedef struct stored {
    uint64_t address; /* 0: absent */
    uint32_t rounded;
} stored;

/* A place in a script: before event `event`, or inside it after `steps` of its steps. */
typedef struct place {
    size_t event, steps;
} place;

#define NEVER SIZE_MAX

/* A cuBLAS workspace that PyTorch keeps. */
typedef struct kept {
    uint64_t address;
    place first; /* the step of its first use; event NEVER: not used yet */
} kept;

/* Workspaces of a convolution: cuDNN's first plan; its next plan; and the most that it still takes after a refusal
 * (UINT64_MAX before). */
typedef struct workspaces {
    uint64_t first, next, most;
} workspaces;

/* workspace: bytes of the last step's workspace, if that step is a convolution. */
typedef struct peak {
    place at;
    uint64_t workspace;
} peak;

/* A call's trace as it was walked with this device's memory. */
typedef struct walked {
    size_t event;
    vm_called called; /* owned */
} walked;

enum { CUBLAS, CUBLASLT };

struct vm_play {
    const vm_script *script;
    vm_talloc *talloc, *owned; /* owned: talloc, if the play owns it */
    vm_blas blas;
    uint64_t memory;
    bool first_only;   /* whether next plans need what the first ones need */
    size_t event;      /* events played, */
    uint64_t *reached; /* and the most bytes reserved until the end of each */
    stored *stored;    /* [storages] */
    uint64_t *address; /* [ids] of the storages of a call in progress, otherwise zeros */
    size_t ids;
    workspaces *workspaces; /* [convs] */
    size_t storages, convs; /* of the script, as far as this play knows them */
    size_t refused;         /* convolutions that were refused their workspace */
    walked *walked;         /* [walks] */
    size_t walks;
    kept kept[2];
    uint64_t most_reserved;       /* before the peak was reset */
    uint64_t allocated, reserved; /* bytes when the peak was reset, */
    size_t reset;                 /* and the events before that */
    uint64_t peak_bytes;          /* the most bytes since then, */
    peak peak;                    /* and where that is */
    vm_reading *reading;          /* [readings], */
    peak *reading_peak;           /* and their peaks */
    size_t readings;
    bool notes_heights;
    vm_heights heights;
    bool full;         /* the last event filled the simulated device, */
    vm_talloc_oom oom; /* and these are its figures */
};

/* Returns: the trace of a call that was played. */
const vm_called *vm_play_called(const vm_play *p, size_t event);

/* ---- a call's steps (play_steps.c) ---- */

/* State of a player of steps. */
typedef struct run {
    vm_talloc *talloc;
    const vm_blas *blas;
    const vm_called *of;
    uint64_t *address;              /* [ids] of the trace's storages */
    uint64_t *workspace, *next;     /* [script->convs]; next: or NULL */
    uint64_t *cublas[2];            /* addresses of the workspaces that are kept */
    size_t kept_at[2];              /* the step that first used one, if it was not there; or NEVER */
    uint64_t *allocated, *reserved; /* [steps], or NULL */
    size_t highest;                 /* the step with the greatest height */
} run;

uint64_t vm_play_now(const vm_talloc *a, vm_talloc_kind kind);
vm_status vm_play_step(run *r, const vm_trace_step *step, uint64_t *height);
/* Plays all steps of a call. Skips a stretch if an earlier one of its kind left the allocator as it is now: it would
 * run the same way. */
vm_status vm_play_steps(run *r);

#endif
