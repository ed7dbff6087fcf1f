/* The thin binding: check arguments, borrow pointers, release the GIL, one vm_ call, raise. No arithmetic here.
 * One file a type; py_module.c puts them together. */
#ifndef VM_PY_H
#define VM_PY_H

#include "py_shared.h"

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL vaemem_core_array
#ifndef VM_PY_MODULE
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>
#include <stdatomic.h>

#include "../vm.h"

/* An architecture as the dict that Python sees, and for PyArg_ParseTuple's O& back: a vm_arch. */
PyObject *vm_py_arch_to_dict(const vm_arch *arch);
int vm_py_to_arch(PyObject *dict, void *arch);
/* A set of the CPU's kernels. name: NULL or "" for the best usable one. NULL with an exception set. */
const vm_backend *vm_py_backend(const char *name, vm_dtype dtype, vm_precision precision);
/* For PyArg_ParseTuple's O&: a vm_precision. */
int vm_py_to_precision(PyObject *name, void *out);
/* For PyArg_ParseTuple's O&: an unsigned, from 1 to VM_PY_THREADS. */
int vm_py_to_threads(PyObject *number, void *out);
enum { VM_PY_THREADS = 1024 };
/* ml_dtypes' type, which NumPy knows by its name alone. */
bool vm_py_is_bfloat16(PyArrayObject *a);
/* A tuple of integers. */
PyObject *vm_py_sizes(const size_t *size, size_t count);

/* Threads. An object that two of them can reach (Model, CachingAllocator, Process, Trace) has one vm_py_lock.
 * Whoever reads or changes what the object may change after it was made holds it, with the GIL or without; what is
 * fixed when the object is made (an architecture, an allocator's settings) is read without it, and so a run can be
 * planned during another. Arguments are parsed before it is taken, since that may call Python; of Python's code only
 * a run's progress callback and signal handlers are called with it held on purpose. Some calls take several, in this
 * order: a Trace's, a Process's, a CachingAllocator's. Cudnn and vaemem._cuda.Backend have none: their C locks
 * itself, without the GIL. Accounts (mem.c) lock themselves too.
 * A fork may leave a lock held by a thread that the child does not have. The child then refuses to use that object. */
typedef struct vm_py_lock {
    PyThread_type_lock lock;
    const char *type;   /* the object's, for messages */
    atomic_ulong owner; /* the thread that holds it, or 0 */
    atomic_uint forks;  /* of which process that thread is */
    unsigned readers;   /* how often that thread holds it once more, to read */
} vm_py_lock;

/* -1 with an exception set. An object of zeros may be freed too. */
int vm_py_lock_new(vm_py_lock *l, const char *type);
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

/* py_allocator.c: raises allocator.OutOfMemoryError with vm_error()'s sentence and the figures. */
struct vm_talloc;
struct vm_talloc_oom;
void vm_py_raise_full(PyObject *allocator, const struct vm_talloc_oom *oom);
/* The simulated allocator inside a CachingAllocator, and the lock to take for it; both borrowed. NULL: TypeError. */
struct vm_talloc *vm_py_allocator(PyObject *object, vm_py_lock **lock);

/* py_trace.c: the same of a Trace. */
struct vm_trace;
struct vm_trace *vm_py_trace(PyObject *object, vm_py_lock **lock);
/* py_process.c: all that a Process did, as one; NULL where it is no Process. */
const struct vm_trace *vm_py_script(PyObject *object);
/* A Trace, a type of the module's, around a trace, which it takes over even where it fails. */
PyObject *vm_py_wrap_trace(PyTypeObject *type, struct vm_trace *trace);

/* What the module has, by file. */
extern PyType_Spec vm_py_model_type, vm_py_cudnn_type, vm_py_trace_type, vm_py_process_type, vm_py_program_type,
    vm_py_profile_type, vm_py_lookup_type;
extern PyMethodDef vm_py_unpickle[], vm_py_lookups[];
int vm_py_add_allocator(PyObject *module); /* with its exception; -1 with one set */

#endif
