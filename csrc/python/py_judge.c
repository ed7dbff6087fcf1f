/* vaemem._core.judge and judge_bound: whether a run fits a card. */
#include "../predict/judge.h"
#include "py.h"

static PyObject *judge_bound(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long reserved, exact;
    if (!PyArg_ParseTuple(args, "KK:judge_bound", &reserved, &exact)) return NULL;
    return PyLong_FromUnsignedLongLong(vm_judge_bound(reserved, exact));
}

static PyObject *judge(PyObject *Py_UNUSED(module), PyObject *args) {
    int fits, guesses, untried, is_rough = 0;
    unsigned long long available, kept_more, most, bound;
    vm_reason why;
    if (!PyArg_ParseTuple(args, "pppKKKK|p:judge", &fits, &guesses, &untried, &available, &kept_more, &most, &bound,
                          &is_rough))
        return NULL;
    const vm_card_use use = {fits, guesses, untried, available, kept_more, most, bound, is_rough};
    const vm_verdict verdict = vm_judge(&use, &why);
    return Py_BuildValue("(ss)", vm_verdict_name[verdict], vm_reason_name[why]);
}

PyMethodDef vm_py_judges[] = {
    {"judge_bound", judge_bound, METH_VARARGS,
     "judge_bound(reserved, exact, /)\n--\n\nReturns the bound of a process that is predicted to reserve these "
     "bytes; the exact ones get no margin."},
    {"judge", judge, METH_VARARGS,
     "judge(fits, guesses, untried, available, kept_more, most, bound, is_rough=False, /)\n--\n\nReturns (verdict, why "
     "it is tight): whether a run fits a card. is_rough: the bound may be larger. If the verdict depends on the rest, "
     "it is ''."},
    {NULL, NULL, 0, NULL}};
