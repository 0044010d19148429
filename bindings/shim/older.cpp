// For wheels: what glibc 2.28 lacks, a part of each library that calls it. wheel.py says if anything else is missing.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define OLDER extern "C" __attribute__((visibility("hidden")))
struct stat;

OLDER int stat(const char * path, struct stat * out) { return (int) syscall(SYS_newfstatat, AT_FDCWD, path, out, 0); }

OLDER int lstat(const char * path, struct stat * out) {
    return (int) syscall(SYS_newfstatat, AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW);
}

OLDER int fstat(int file, struct stat * out) { return (int) syscall(SYS_fstat, file, out); }
OLDER int fstat64(int file, struct stat * out) { return fstat(file, out); }

OLDER int getcpu(unsigned * cpu, unsigned * node) { return (int) syscall(SYS_getcpu, cpu, node, nullptr); }

OLDER unsigned arc4random() {
    unsigned number = 0;
    while (syscall(SYS_getrandom, &number, sizeof number, 0) != sizeof number) {
    }
    return number;
}

// libstdc++ leaves locks out where this is true.
OLDER char __libc_single_threaded;
char __libc_single_threaded = 0;
