/* Preloaded into a child: the Nth system call that changes something below a directory fails, or all from the Nth on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static long calls;

static int below(const char *path) {
    const char *under = getenv("LZ_FAIL_UNDER");
    return under != NULL && path != NULL && strncmp(path, under, strlen(under)) == 0;
}

static int fails(const char *path) {
    if (!below(path)) return 0;
    long n = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    long at = atol(getenv("LZ_FAIL_AT"));
    if (n < at || (n > at && strcmp(getenv("LZ_FAIL_FOREVER"), "1") != 0)) return 0;
    errno = atoi(getenv("LZ_FAIL_ERRNO"));
    return 1;
}

static int fd_fails(int fd) {
    char link[64], path[4096];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length < 0) return 0;
    path[length] = 0;
    return fails(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                       \
    int name(const char *path, int flags, ...) {                         \
        va_list args;                                                    \
        va_start(args, flags);                                           \
        mode_t mode = va_arg(args, mode_t);                              \
        va_end(args);                                                    \
        if (fails(path)) return -1;                                      \
        return REAL(name)(path, flags, mode);                            \
    }
OPEN(open)
OPEN(open64)

#define ON_FD(type, name, parameters, arguments)                         \
    type name parameters {                                               \
        if (fd_fails(fd)) return -1;                                     \
        return REAL(name) arguments;                                     \
    }
ON_FD(ssize_t, write, (int fd, const void *data, size_t n), (fd, data, n))
ON_FD(ssize_t, pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at))
ON_FD(ssize_t, pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at))
ON_FD(int, ftruncate, (int fd, off_t length), (fd, length))
ON_FD(int, ftruncate64, (int fd, off64_t length), (fd, length))
ON_FD(int, fsync, (int fd), (fd))
ON_FD(int, fdatasync, (int fd), (fd))
ON_FD(int, fchmod, (int fd, mode_t mode), (fd, mode))

#define ON_PATH(name, parameters, arguments)                             \
    int name parameters {                                                \
        if (fails(path)) return -1;                                      \
        return REAL(name) arguments;                                     \
    }
ON_PATH(unlink, (const char *path), (path))
ON_PATH(rename, (const char *path, const char *to), (path, to))
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode))

__attribute__((destructor)) static void report(void) {
    const char *path = getenv("LZ_FAIL_REPORT");
    FILE *file = path == NULL ? NULL : fopen(path, "w");
    if (file != NULL) {
        fprintf(file, "%ld", calls);
        fclose(file);
    }
}
