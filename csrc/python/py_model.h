/* What py_model.c and py_run.c share. */
#ifndef VM_PY_MODEL_H
#define VM_PY_MODEL_H

#include "py.h"

typedef struct Model {
    PyObject_HEAD
    vm_model *model;
    PyThread_type_lock lock; /* held by whoever uses model; runs wait for each other */
    PyObject *backend;       /* the capsule that keeps model->backend alive, or None */
} Model;

/* Waits without the GIL, in slices so that Ctrl-C is heard. -1 with an exception set. */
int vm_py_lock(Model *self);
void vm_py_unlock(Model *self);

extern const char vm_py_plan_doc[], vm_py_run_doc[], vm_py_run_at_doc[];
PyObject *vm_py_plan(Model *self, PyObject *args, PyObject *kwargs);
PyObject *vm_py_run(Model *self, PyObject *args, PyObject *kwargs);
PyObject *vm_py_run_at(Model *self, PyObject *args, PyObject *kwargs);

#endif
