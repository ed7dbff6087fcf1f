/* cuDNN's recorded answers, read from Python's objects. */
#ifndef VM_PY_PROFILE_H
#define VM_PY_PROFILE_H

#include "../predict/workspace/lookup.h"
#include "py.h"

/* Returns: the core's profile, borrowed until the Profile is freed. NULL: TypeError. */
const vm_profile *vm_py_profile(PyObject *object);
/* Reads a rule from a dict. formula: whether it is required. -1 with an exception set. */
int vm_py_to_rule(PyObject *dict, bool formula, vm_rule *rule);

#endif
