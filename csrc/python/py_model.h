/* What py_model.c and py_run.c share. */
#ifndef VM_PY_MODEL_H
#define VM_PY_MODEL_H

#include <stdatomic.h>

#include "py.h"

/* Whoever reads or changes what a Model may change after it was made holds its lock, with the GIL or without; what is
 * fixed when the object is made (an architecture) is read without it, and so a run can be planned during another.
 * Arguments are parsed before it is taken, since that may call Python; of Python's code only a run's progress callback
 * and signal handlers are called with it held on purpose. A fork may leave a lock held by a thread that the child does
 * not have. The child then refuses to use that object. */
typedef struct vm_py_lock {
    PyThread_type_lock lock;
    atomic_ulong owner; /* the thread that holds it, or 0 */
    atomic_uint forks;  /* of which process that thread is */
    unsigned readers;   /* how often that thread holds it once more, to read */
} vm_py_lock;

/* -1 with an exception set. An object of zeros may be freed too. */
int vm_py_lock_new(vm_py_lock *l);
void vm_py_lock_free(vm_py_lock *l);
/* Waits without the GIL, in slices so that Ctrl-C is heard. call: the method, for messages. -1 with an exception set:
 * RuntimeError where this same thread holds it already, or a thread that a fork left behind. */
int vm_py_acquire(vm_py_lock *l, const char *call);
/* For what reads only what no holder changes while it calls Python, such as a model's weights: the thread that holds
 * the lock gets it once more. */
int vm_py_acquire_to_read(vm_py_lock *l, const char *call);
void vm_py_release(vm_py_lock *l);
/* Releases it; None, or the status raised. */
PyObject *vm_py_done(vm_py_lock *l, vm_status status);

typedef struct Model {
    PyObject_HEAD
    vm_model *model;
    vm_py_lock lock;   /* runs wait for each other */
    PyObject *backend; /* the capsule that keeps model->backend alive, or None */
} Model;

extern const char vm_py_plan_doc[], vm_py_run_doc[], vm_py_reserve_doc[], vm_py_blend_doc[];
PyObject *vm_py_plan(Model *self, PyObject *args, PyObject *kwargs);
PyObject *vm_py_run(Model *self, PyObject *args, PyObject *kwargs);
PyObject *vm_py_reserve(Model *self, PyObject *bytes);
PyObject *vm_py_blend(Model *self, PyObject *args, PyObject *kwargs);

#endif
