/* A script: what a program does with a device's memory, in order, apart from any device.
 *
 *   take, give, call, empty, reset, read -> events       written once, by a walk, a text or a recorder
 *   storages, names, convolutions                        numbered from 0, in order of first use
 *   play.h plays a script on a device, judge.h judges the plays
 *
 * A call plays a trace. Storages that a trace frees again have numbers within the trace only. Storages that it leaves
 * also have numbers in the script. Plays only read a script, so threads may share a complete one. */
#ifndef VM_SCRIPT_H
#define VM_SCRIPT_H

#include "trace/trace.h"

typedef enum vm_event_kind {
    VM_EVENT_TAKE,    /* storages come */
    VM_EVENT_REPLACE, /* each storage comes, then the one that it replaces goes */
    VM_EVENT_GIVE,    /* storages go */
    VM_EVENT_CALL,    /* of a trace, which leaves storages */
    VM_EVENT_EMPTY,   /* torch.cuda.empty_cache */
    VM_EVENT_RESET,   /* torch.cuda.reset_peak_memory_stats: a phase begins */
    VM_EVENT_READ,    /* a phase ends */
    VM_EVENT_NOTHING  /* an event that failed when it was written */
} vm_event_kind;

typedef struct vm_event {
    vm_event_kind kind;
    uint32_t first, count; /* storages that come: their first number; the script's storages before the event */
    uint32_t stamp;        /* of storages that come: their name in the allocator's history */
    size_t of;             /* number of a call's trace, or of a phase */
    size_t gone, goes;     /* storages that go: first and number in the script's list */
} vm_event;

/* name: its name in lists of live storages. stream: the CUDA stream of its allocation; 0 is PyTorch's default. */
typedef struct vm_storage {
    uint64_t bytes; /* as requested */
    uint32_t name, stream;
    bool is_there; /* at the end of the script as written so far */
} vm_storage;

/* A trace's names, convolutions and storages by their numbers in the script. */
typedef struct vm_called {
    vm_trace *trace; /* shared */
    uint32_t *name;  /* [trace->names.count] */
    uint32_t *conv;  /* [trace->convs] */
    uint32_t *left;  /* [lefts], ids of the trace's storages that it leaves, ascending */
    size_t lefts;
} vm_called;

/* Each count stops at UINT64_MAX. */
typedef struct vm_work {
    uint64_t flops;      /* on the device */
    uint64_t attended;   /* of flops: in fused attentions */
    uint64_t moved;      /* bytes read and written in the device's memory */
    uint64_t sent;       /* bytes of weights sent to the device */
    uint64_t host_flops; /* on the host */
} vm_work;

/* A phase of the program, which a read ends. Its work counts from the read before. */
typedef struct vm_phase {
    uint32_t name;
    uint64_t outside; /* bytes of the device that the program held outside PyTorch */
    vm_work work;
} vm_phase;

typedef struct vm_script {
    vm_names names;
    size_t events, called, convs, phases, goings;
    uint32_t storages, cublas, cublaslt; /* the last two: names of cuBLAS's workspaces, once something was called */
    vm_event *event;
    vm_storage *storage;
    uint32_t *going; /* [goings] storages that go */
    vm_called *call;
    vm_conv *conv; /* distinct questions */
    vm_phase *phase;
    vm_work work; /* since the last phase, */
    uint64_t outside;
    uint64_t times; /* and how often further work counts */
} vm_script;

vm_status vm_script_new(vm_script **out);
void vm_script_free(vm_script *s); /* accepts NULL */

/* Every function that writes an event fails with the script as it was. */

/* Storages of these bytes under one name. *first: the number of the first one. */
vm_status vm_script_take(vm_script *s, const char *stamp, const char *name, const uint64_t *bytes, size_t count,
                         uint32_t *first);
/* New storages in place of those in id[], each under the name of the old one, which goes. A size of 0 leaves a storage
 * as it is. id: in and out. VM_EINVAL if one is not there. */
vm_status vm_script_replace(vm_script *s, const char *stamp, uint32_t *id, const uint64_t *bytes, size_t count);
/* VM_EINVAL if one is not there. */
vm_status vm_script_give(vm_script *s, const uint32_t *id, size_t count);
/* Shares the trace: nobody may change it from now on. *event: the new event, borrowed until the next one. */
vm_status vm_script_call(vm_script *s, vm_trace *t, const vm_event **event);
vm_status vm_script_empty_cache(vm_script *s);
vm_status vm_script_reset_peak(vm_script *s);
/* Ends the phase under a name. */
vm_status vm_script_read(vm_script *s, const char *name);

/* Adds work to the phase. outside: bytes of the device that the program holds outside PyTorch until the phase ends; the
 * largest value counts. */
void vm_script_count(vm_script *s, const vm_work *work, uint64_t outside);
/* Multiplies work counted from now on: one played step of a loop stands for `times` steps. */
void vm_script_times(vm_script *s, uint64_t times);

/* Notes that the last event failed when it was played, after `taken` of its storages were there. Those
 * stay. The rest never came, and the storages that the rest would have replaced are still there. */
void vm_script_failed(vm_script *s, size_t taken);

/* Finds a trace's names and convolutions in a script. VM_EINVAL if the script lacks one. Free *out with
 * vm_called_free. */
vm_status vm_script_find(const vm_script *s, vm_trace *t, vm_called *out);
void vm_called_free(vm_called *c);

#endif
