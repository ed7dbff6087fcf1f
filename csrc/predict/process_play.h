/* Inside a process (process.h): what it keeps, and what plays its script. For process.c and its neighbours alone. */
#ifndef VM_PROCESS_PLAY_H
#define VM_PROCESS_PLAY_H

#include "process.h"

typedef struct storage {
    uint64_t address; /* 0: not there */
    uint64_t bytes;
    uint32_t name;
} storage;

/* A workspace of cuBLAS's that is kept. */
typedef struct kept {
    uint64_t address;
    size_t step;     /* that first uses it */
    uint32_t before; /* as many storages were numbered before that call */
    uint32_t name;
} kept;

/* What a convolution met in a pool: what was cached, and the segment that its workspace made. */
typedef struct met {
    uint64_t room, made;
} met;

/* From a step on so much was reserved. */
typedef struct change {
    size_t step;
    uint64_t reserved;
} change;

/* A row that was played in a pool: what its convolutions met there, and what was reserved. */
typedef struct played {
    met *met; /* [calls], or NULL where the allocator is not plain */
    change *change;
    size_t changes;
    const struct played *like; /* itself, or a row before it that went alike */
} played;

enum { CUBLAS, CUBLASLT };
#define NEVER SIZE_MAX

struct vm_process {
    vm_talloc *talloc;
    vm_process_blas blas;
    vm_trace *script;
    storage *storage;      /* [script->ids] */
    uint64_t *most;        /* by convolution: what ran where the workspace could not be had, else UINT64_MAX */
    size_t mosts, refused; /* how many there are, and how many of these could not be had */
    kept kept[2];
    uint32_t found;     /* the storage that was looked for last */
    size_t reset;       /* steps before the peak was reset */
    uint64_t peak;      /* bytes at the most since, */
    size_t call, end;   /* behind so many steps, of which those from `call` on are a call's, up to its height */
    uint64_t workspace; /* of the convolution that is the last of them */
    played small;       /* a row in the small pool, which nearly all others go like, */
    size_t until;       /* of so many steps */
    bool full;          /* the last call failed because the simulated device was full, */
    vm_talloc_oom oom;  /* and these are its figures */
};

/* ---- process_play.c ---- */

typedef enum pool { BOTH_POOLS, LARGE_POOL, SMALL_POOL } pool;

/* Where steps are played, and what with. */
typedef struct run {
    vm_talloc *talloc;
    const vm_process_blas *blas;
    storage *storage;
    uint64_t *workspace, *next; /* [convs]; next: or NULL */
    kept kept[2];
    const uint32_t *stamp;          /* the name in the allocator's history, else the step's */
    uint64_t *allocated, *reserved; /* of each step that was played, or NULL */
    pool pool;                      /* all else is passed over */
    met *met;                       /* where the next convolution's goes, of a pool of a plain allocator, or NULL */
    size_t highest;                 /* the step with the greatest height */
} run;

uint64_t vm_play_now(const vm_talloc *a, vm_talloc_kind kind);
/* Whether bytes are of the pool that is played. */
bool vm_play_has(const run *r, uint64_t bytes);
/* The segment that a workspace would make, with so much room cached. */
uint64_t vm_play_makes(const run *r, uint64_t room, uint64_t workspace);
/* *height: allocated bytes while a workspace was there, where there was one. */
vm_status vm_play_step(run *r, const vm_trace_step *step, uint64_t *height);
/* Plays the script's steps from *at until `until`; *at: the first that was not played. */
vm_status vm_play(run *r, const vm_trace *script, size_t *at, size_t until);

/* ---- process_again.c ---- */

void vm_process_forget_row(played *row);

#endif
