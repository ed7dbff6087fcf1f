/* vaemem._core.judge and judge_bound: whether a run fits a card. */
#include "../predict/judge.h"
#include "py.h"

static PyObject *judge_bound(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long reserved, exact;
    if (!PyArg_ParseTuple(args, "KK:judge_bound", &reserved, &exact)) return NULL;
    return PyLong_FromUnsignedLongLong(vm_judge_bound(reserved, exact));
}

/* True if the callable raises; the exception then stays set. */
static bool may_take(void *context, uint64_t bytes) {
    PyObject *answer = PyObject_CallFunction(context, "K", (unsigned long long)bytes);
    const int is = answer ? PyObject_IsTrue(answer) : 1;
    Py_XDECREF(answer);
    return is != 0;
}

static PyObject *judge(PyObject *Py_UNUSED(module), PyObject *args) {
    int fits, guesses, untried;
    unsigned long long available, kept_more, most;
    vm_card_use use = {.may_take = may_take};
    vm_reason why;
    if (!PyArg_ParseTuple(args, "pppKKKO:judge", &fits, &guesses, &untried, &available, &kept_more, &most,
                          &use.context))
        return NULL;
    use.fits = fits;
    use.guesses = guesses;
    use.untried = untried;
    use.available = available;
    use.kept_more = kept_more;
    use.most = most;
    const vm_verdict verdict = vm_judge(&use, &why);
    if (PyErr_Occurred()) return NULL;
    return Py_BuildValue("(ss)", vm_verdict_name[verdict], vm_reason_name[why]);
}

PyMethodDef vm_py_judges[] = {
    {"judge_bound", judge_bound, METH_VARARGS,
     "judge_bound(reserved, exact, /)\n--\n\nReturns the bound of a process that is predicted to reserve these "
     "bytes; the exact ones get no margin."},
    {"judge", judge, METH_VARARGS,
     "judge(fits, guesses, untried, available, kept_more, most, may_take, /)\n--\n\nReturns (verdict, why it is "
     "tight): whether a run fits a card. may_take(bytes): whether the run's bound is at least `bytes`; called "
     "last."},
    {NULL, NULL, 0, NULL}};
