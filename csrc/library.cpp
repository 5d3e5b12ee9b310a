// Owns the namespace. Every family adds its schemas and kernels to it with TORCH_LIBRARY_FRAGMENT and _IMPL.
#include <torch/library.h>

#include "host/op_handle.h"

TORCH_LIBRARY(HTREE_NAMESPACE, library) {
  (void)library;
}

// Loading the shared object registers the ops. `import htree_ops._C` needs an entry point and nothing else, which keeps
// the library independent of the Python version (Py_LIMITED_API). A thin layer is only ever loaded as a library of ops.
#if !defined(HTREE_THIN_LAYER)
#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
#endif
