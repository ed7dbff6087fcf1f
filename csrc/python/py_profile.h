/* Recorded answers of cuDNN, as Python's objects hand them over. */
#ifndef VM_PY_PROFILE_H
#define VM_PY_PROFILE_H

#include "../predict/lookup.h"
#include "py.h"

/* The core's profile, borrowed until the Profile goes. NULL: TypeError. */
const vm_profile *vm_py_profile(PyObject *object);
/* Reads a rule from a dict. formula: whether it must have one. -1 with an exception set. */
int vm_py_to_rule(PyObject *dict, bool formula, vm_rule *rule);

#endif
