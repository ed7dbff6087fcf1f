/* Shared by py_model.c and py_run.c. */
#ifndef VM_PY_MODEL_H
#define VM_PY_MODEL_H

#include <stdatomic.h>

#include "py.h"

/* The lock protects everything that may change in a Model after its creation, with the GIL or without. Constants (an
 * architecture) are read without it, so a run can be planned during another. Arguments are parsed before locking, since
 * that may call Python. Only a run's progress callback and signal handlers run Python code under the lock. After a fork
 * the lock may belong to a thread that the child does not have; the child then refuses to use that object. */
typedef struct vm_py_lock {
    PyThread_type_lock lock;
    atomic_ulong owner; /* the thread that holds it, or 0 */
    atomic_uint forks;  /* the process of that thread */
    unsigned readers;   /* how many more times that thread holds it, to read */
} vm_py_lock;

/* -1 with an exception set. vm_py_lock_free accepts zeros. */
int vm_py_lock_new(vm_py_lock *l);
void vm_py_lock_free(vm_py_lock *l);
/* Waits without the GIL, in slices so that Ctrl-C works. call: the method, for messages. -1 with an exception set:
 * RuntimeError if this thread holds the lock already, or a fork left it behind. */
int vm_py_acquire(vm_py_lock *l, const char *call);
/* As vm_py_acquire, but the holding thread may acquire it once more. For reading only what no holder changes while it
 * calls Python, such as a model's weights. */
int vm_py_acquire_to_read(vm_py_lock *l, const char *call);
void vm_py_release(vm_py_lock *l);
/* Releases the lock. Returns: None, or NULL with the status raised. */
PyObject *vm_py_done(vm_py_lock *l, vm_status status);

typedef struct Model {
    PyObject_HEAD
    vm_model *model;
    vm_py_lock lock;   /* runs wait for each other */
    PyObject *backend; /* the capsule that owns model->backend, or None */
} Model;

extern const char vm_py_plan_doc[], vm_py_run_doc[], vm_py_reserve_doc[], vm_py_blend_doc[];
PyObject *vm_py_plan(Model *self, PyObject *args, PyObject *kwargs);
PyObject *vm_py_run(Model *self, PyObject *args, PyObject *kwargs);
PyObject *vm_py_reserve(Model *self, PyObject *bytes);
PyObject *vm_py_blend(Model *self, PyObject *args, PyObject *kwargs);

#endif
