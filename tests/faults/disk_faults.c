/* Stands between a process and its disk: counts what it does to the files of one folder, lets the n-th of these calls
 * fail, and can log them all. It is preloaded (LD_PRELOAD), so that SQLite's calls count as Python's do.
 *
 * Calls that count: making, writing, cutting, syncing, renaming and removing files and folders. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, ERROR, FULL, HALF, KILL };

static char root[PATH_MAX];
static size_t root_length;
static int log_fd = -1, how = NOTHING;
static atomic_long calls, fail_at;
static char failed[PATH_MAX + 64];

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* From here on the calls for files under `folder` count; `at` 0 lets none fail. FULL fails that call and all later
 * ones that need space; the others fail once. */
void disk_faults_arm(const char *folder, long at, int kind, const char *log) {
    root_length = strlen(strncpy(root, folder, sizeof root - 1));
    log_fd = log == NULL ? -1 : syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    how = kind;
    failed[0] = 0;
    atomic_store(&calls, 0);
    atomic_store(&fail_at, at);
}

void disk_faults_disarm(void) {
    root_length = 0;
    if (log_fd >= 0) syscall(SYS_close, log_fd);
    log_fd = -1;
}

long disk_faults_calls(void) { return atomic_load(&calls); }
const char *disk_faults_failed(void) { return failed; }

static int under_root(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || path[root_length] == 0);
}

/* The path, absolute, of a name that may be relative to a folder; whether it is under the root. */
static int place(int folder, const char *name, char *path) {
    if (!root_length || name == NULL) return 0;
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return under_root(path);
    }
    char link[64];
    if (folder == AT_FDCWD) {
        if (syscall(SYS_getcwd, path, PATH_MAX) < 0) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, path, PATH_MAX - 1);
        if (length < 0) return 0;
        path[length] = 0;
    }
    size_t length = strlen(path);
    snprintf(path + length, PATH_MAX - length, "/%s", name);
    return under_root(path);
}

static int place_of(int fd, char *path) {
    if (!root_length) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return under_root(path);
}

static unsigned long inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

/* One line, and after it the bytes: call, inode, offset, length, path, other path; names hold no tabs here. */
static void tell(const char *call, unsigned long inode, long offset, size_t length, const char *path,
                 const char *other, const struct iovec *parts, int count) {
    if (log_fd < 0) return;
    char line[2 * PATH_MAX + 128];
    int size = snprintf(line, sizeof line, "%s\t%lu\t%ld\t%zu\t%s\t%s\n", call, inode, offset, length, path,
                        other == NULL ? "" : other);
    char *at = line;
    while (size > 0) {
        long done = syscall(SYS_write, log_fd, at, size);
        if (done <= 0) return;
        at += done, size -= done;
    }
    for (int i = 0; i < count && length; i++) {
        const char *bytes = parts[i].iov_base;
        size_t left = parts[i].iov_len < length ? parts[i].iov_len : length;
        length -= left;
        while (left) {
            long done = syscall(SYS_write, log_fd, bytes, left);
            if (done <= 0) return;
            bytes += done, left -= done;
        }
    }
}

/* Leave a word in the log. */
void disk_faults_mark(const char *word) { tell("mark", 0, 0, 0, root, word, NULL, 0); }

/* Count a call; what is to happen to it. */
static int fate(const char *call, const char *path, int needs_space) {
    long now = atomic_fetch_add(&calls, 1) + 1, at = atomic_load(&fail_at);
    int hit = at && (now == at || (how == FULL && now > at && needs_space));
    if (!hit) return NOTHING;
    if (now == at) snprintf(failed, sizeof failed, "%s %s", call, path + root_length);
    if (how == KILL) raise(SIGKILL);
    return how;
}

static int refuse(int needs_space) {
    errno = needs_space ? ENOSPC : EIO;
    return -1;
}

static ssize_t put(const char *call, int fd, const struct iovec *parts, int count, long offset, int positioned) {
    char path[PATH_MAX];
    int counts = place_of(fd, path), flags = counts ? fcntl(fd, F_GETFL) : 0, end = NOTHING;
    struct iovec half;
    if (counts) {
        end = fate(call, path, 1);
        if (end == HALF && parts[0].iov_len > 1) {
            half = (struct iovec){parts[0].iov_base, parts[0].iov_len / 2};
            parts = &half, count = 1;
        } else if (end != NOTHING) {
            return refuse(1);
        }
        if (!positioned) offset = syscall(SYS_lseek, fd, 0, flags & O_APPEND ? SEEK_END : SEEK_CUR);
    }
    /* The raw call of pwritev takes the offset in two halves; on 64 bits the first holds all of it. */
    ssize_t done = positioned ? syscall(SYS_pwritev, fd, parts, count, offset, 0L) : syscall(SYS_writev, fd, parts, count);
    if (counts && done > 0) tell("write", inode_of(fd), offset, done, path, NULL, parts, count);
    return end == HALF ? refuse(1) : done;
}

ssize_t write(int fd, const void *bytes, size_t size) {
    if (!root_length) return syscall(SYS_write, fd, bytes, size);
    struct iovec part = {(void *)bytes, size};
    return put("write", fd, &part, 1, 0, 0);
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) {
    struct iovec part = {(void *)bytes, size};
    return put("write", fd, &part, 1, offset, 1);
}
ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset) { return pwrite(fd, bytes, size, offset); }
ssize_t writev(int fd, const struct iovec *parts, int count) { return put("write", fd, parts, count, 0, 0); }

/* numpy writes arrays through stdio, whose own calls cannot be replaced: past its buffer, then. */
size_t fwrite(const void *bytes, size_t size, size_t count, FILE *file) {
    char path[PATH_MAX];
    int fd = fileno(file);
    if (!place_of(fd, path)) return REAL(fwrite)(bytes, size, count, file);
    if (fflush(file)) return 0;
    struct iovec part = {(void *)bytes, size * count};
    ssize_t done = put("write", fd, &part, 1, 0, 0);
    int reason = errno;
    fseeko(file, lseek(fd, 0, SEEK_CUR), SEEK_SET);
    errno = reason;
    return done < 0 || !size ? 0 : done / size;
}

static int synced(const char *call, int fd) {
    char path[PATH_MAX];
    int counts = place_of(fd, path);
    if (counts && fate("fsync", path, 0) != NOTHING) return refuse(0);
    int done = call[1] == 's' ? REAL(fsync)(fd) : REAL(fdatasync)(fd);
    if (counts && !done) tell("fsync", inode_of(fd), 0, 0, path, NULL, NULL, 0);
    return done;
}
int fsync(int fd) { return synced("fsync", fd); }
int fdatasync(int fd) { return synced("fdatasync", fd); }

static int cut(int fd, off64_t size) {
    char path[PATH_MAX];
    int counts = place_of(fd, path);
    if (counts && fate("truncate", path, 0) != NOTHING) return refuse(0);
    int done = syscall(SYS_ftruncate, fd, size);
    if (counts && !done) tell("truncate", inode_of(fd), size, 0, path, NULL, NULL, 0);
    return done;
}
int ftruncate(int fd, off_t size) { return cut(fd, size); }
int ftruncate64(int fd, off64_t size) { return cut(fd, size); }

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    struct stat before;
    int counts = (flags & (O_CREAT | O_TRUNC)) && place(folder, name, path), there = 0;
    if (counts) {
        there = !stat(path, &before);
        counts = (!there && (flags & O_CREAT)) || (there && (flags & O_TRUNC) && S_ISREG(before.st_mode) && before.st_size);
    }
    if (counts && fate(there ? "truncate" : "create", path, !there) != NOTHING) return refuse(!there);
    int fd = syscall(SYS_openat, folder, name, flags, mode);
    if (counts && fd >= 0) tell(there ? "truncate" : "create", inode_of(fd), 0, 0, path, NULL, NULL, 0);
    return fd;
}

static mode_t mode_in(int flags, va_list more) { return flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, int) : 0; }
#define OPEN(definition, folder, name)                 \
    definition {                                       \
        va_list more;                                  \
        va_start(more, flags);                         \
        mode_t mode = mode_in(flags, more);            \
        va_end(more);                                  \
        return opened(folder, name, flags, mode);      \
    }
OPEN(int open(const char *name, int flags, ...), AT_FDCWD, name)
OPEN(int open64(const char *name, int flags, ...), AT_FDCWD, name)
OPEN(int openat(int folder, const char *name, int flags, ...), folder, name)
OPEN(int openat64(int folder, const char *name, int flags, ...), folder, name)

static int renamed(int from, const char *old, int to, const char *new) {
    char a[PATH_MAX], b[PATH_MAX];
    int counts = place(from, old, a) & place(to, new, b);
    if (counts && fate("rename", b, 0) != NOTHING) return refuse(0);
    int done = syscall(SYS_renameat2, from, old, to, new, 0);
    if (counts && !done) tell("rename", 0, 0, 0, a, b, NULL, 0);
    return done;
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new); }

static int removed(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    struct stat found;
    int counts = place(folder, name, path) && !lstat(path, &found);
    if (counts && fate(flags ? "rmdir" : "unlink", path, 0) != NOTHING) return refuse(0);
    int done = syscall(SYS_unlinkat, folder, name, flags);
    if (counts && !done) tell("unlink", 0, 0, 0, path, NULL, NULL, 0);
    return done;
}
int unlink(const char *name) { return removed(AT_FDCWD, name, 0); }
int unlinkat(int folder, const char *name, int flags) { return removed(folder, name, flags); }
int rmdir(const char *name) { return removed(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    struct stat found;
    int counts = place(folder, name, path) && lstat(path, &found);
    if (counts && fate("mkdir", path, 1) != NOTHING) return refuse(1);
    int done = syscall(SYS_mkdirat, folder, name, mode);
    if (counts && !done) tell("mkdir", 0, 0, 0, path, NULL, NULL, 0);
    return done;
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

/* Copying inside the kernel would not be seen; callers fall back to writing. */
ssize_t copy_file_range(int a, off64_t *x, int b, off64_t *y, size_t size, unsigned flags) {
    char path[PATH_MAX];
    if (place_of(b, path)) { errno = EXDEV; return -1; }
    return REAL(copy_file_range)(a, x, b, y, size, flags);
}
static ssize_t sent(int to, int from, off64_t *offset, size_t size) {
    char path[PATH_MAX];
    if (place_of(to, path)) { errno = EINVAL; return -1; }
    return syscall(SYS_sendfile, to, from, offset, size);
}
ssize_t sendfile(int to, int from, off_t *offset, size_t size) { return sent(to, from, (off64_t *)offset, size); }
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) { return sent(to, from, offset, size); }
