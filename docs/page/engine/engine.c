/* What capi.js needs of C's library. */
#include <Python.h>

/* Returns: free, as C may call it: Py_tp_free of every type. */
__attribute__((export_name("free_pointer"))) freefunc free_pointer(void) { return free; }
