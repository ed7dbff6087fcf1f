/* A Model's lock; py_model.h states the rule. */
#include <pthread.h>

#include "py_model.h"

/* Forks between the first process that loaded this module and this one. */
static atomic_uint forks;

#ifndef _WIN32 /* Windows has no forks */
static void count_fork(void) { atomic_fetch_add(&forks, 1); }
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }
#endif

int vm_py_lock_new(vm_py_lock *l) {
    if ((l->lock = PyThread_allocate_lock())) return 0;
    PyErr_SetString(PyExc_MemoryError, "memory: no lock could be made");
    return -1;
}

void vm_py_lock_free(vm_py_lock *l) {
    if (l->lock) PyThread_free_lock(l->lock);
}

static bool forked(const vm_py_lock *l) { return atomic_load(&l->forks) != atomic_load(&forks); }
static bool is_mine(const vm_py_lock *l) { return atomic_load(&l->owner) == PyThread_get_thread_ident(); }

/* Returns: whether waiting for the holder would never end; -1 with an exception set. */
static int would_deadlock(const vm_py_lock *l, const char *call) {
    if (forked(l))
        PyErr_Format(PyExc_RuntimeError,
                     "%s: this process was forked while another call was at work on this VAE, which is unfinished here "
                     "for good; make a new one in this process, or fork between calls",
                     call);
    else if (is_mine(l))
        PyErr_Format(PyExc_RuntimeError,
                     "%s: this thread is in the middle of another call of this same VAE, from which a progress "
                     "callback, a signal handler or a __del__ made this one; wait until that call has returned",
                     call);
    else
        return PyErr_CheckSignals();
    return -1;
}

int vm_py_acquire(vm_py_lock *l, const char *call) {
    PyLockStatus got = PyThread_acquire_lock_timed(l->lock, 0, 0);
    while (got != PY_LOCK_ACQUIRED) {
        if (would_deadlock(l, call)) return -1;
        Py_BEGIN_ALLOW_THREADS
        got = PyThread_acquire_lock_timed(l->lock, 50000, 1);
        Py_END_ALLOW_THREADS
    }
    atomic_store(&l->owner, PyThread_get_thread_ident());
    atomic_store(&l->forks, atomic_load(&forks));
    return 0;
}

int vm_py_acquire_to_read(vm_py_lock *l, const char *call) {
    if (forked(l) || !is_mine(l)) return vm_py_acquire(l, call);
    l->readers++;
    return 0;
}

void vm_py_release(vm_py_lock *l) {
    if (l->readers) {
        l->readers--;
        return;
    }
    atomic_store(&l->owner, 0);
    PyThread_release_lock(l->lock);
}

PyObject *vm_py_done(vm_py_lock *l, vm_status status) {
    vm_py_release(l);
    return vm_py_none_or_raise(status);
}
