// Part of every library of a wheel: what a new C library has beside or instead of what an old one has, so that the wheel
// loads from glibc 2.28 on (manylinux_2_28). These are hidden: nothing else of the process sees them.
#include <features.h>

#if defined(__x86_64__) && defined(__GLIBC__)

#define HTREE_HIDDEN extern "C" __attribute__((visibility("hidden")))

// glibc 2.29 gave these a version that leaves errno alone; the numbers are the same.
extern "C" double htree_old_exp(double);
extern "C" double htree_old_log(double);
extern "C" double htree_old_pow(double, double);
asm(".symver htree_old_exp, exp@GLIBC_2.2.5");
asm(".symver htree_old_log, log@GLIBC_2.2.5");
asm(".symver htree_old_pow, pow@GLIBC_2.2.5");

HTREE_HIDDEN double htree_exp(double x) asm("exp");
HTREE_HIDDEN double htree_log(double x) asm("log");
HTREE_HIDDEN double htree_pow(double x, double y) asm("pow");
double htree_exp(double x) {
  return htree_old_exp(x);
}
double htree_log(double x) {
  return htree_old_log(x);
}
double htree_pow(double x, double y) {
  return htree_old_pow(x, y);
}

// glibc 2.32 says here whether reference counts need no atomics. "No" is always right.
HTREE_HIDDEN char htree_single_threaded asm("__libc_single_threaded");
char htree_single_threaded = 0;

#endif
