// Shifts the wall clock of the programs it is loaded into (LD_PRELOAD) by the nanoseconds in a file, which GREY_CLOCK_FILE
// names and which may change at any time. Waits until a time of that clock are shifted, too: a clock set back makes them
// longer, as in the kernel. The monotonic clocks stay as they are.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
// A wait looks at the clock this often, since it may have been set meanwhile.
#define SLICE (SECOND / 5)
// Deadlines of the monotonic clocks are seconds since the start of the machine, and far below this.
#define FIRST_WALL_SECOND 1000000000LL

static volatile int64_t zero;
static volatile int64_t *offset = &zero;
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_cond_wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_cond_clockwait)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
static int (*real_sem_wait)(sem_t *, const struct timespec *);
static int (*real_sem_clockwait)(sem_t *, clockid_t, const struct timespec *);
static long (*real_syscall)(long, ...);

static void *find(const char *name) { return dlsym(RTLD_NEXT, name); }

__attribute__((constructor)) static void load(void) {
    if (real_gettime) return;
    real_gettime = find("clock_gettime");
    // dlsym may find the oldest version of this one, which has another layout.
    real_cond_wait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real_cond_wait) real_cond_wait = find("pthread_cond_timedwait");
    real_cond_clockwait = find("pthread_cond_clockwait");
    real_sem_wait = find("sem_timedwait");
    real_sem_clockwait = find("sem_clockwait");
    real_syscall = find("syscall");
    const char *path = getenv("GREY_CLOCK_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) offset = page;
}

static int64_t nanoseconds(const struct timespec *at) { return at->tv_sec * SECOND + at->tv_nsec; }

static struct timespec timespec_of(int64_t ns) {
    struct timespec at = {.tv_sec = ns / SECOND, .tv_nsec = ns % SECOND};
    return at;
}

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

static int64_t true_now(void) {
    struct timespec at;
    load();
    real_gettime(CLOCK_REALTIME, &at);
    return nanoseconds(&at);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    load();
    int result = real_gettime(clock, at);
    if (result == 0 && is_wall(clock)) *at = timespec_of(nanoseconds(at) + *offset);
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    (void)zone;
    int64_t ns = true_now() + *offset;
    at->tv_sec = ns / SECOND;
    at->tv_usec = ns % SECOND / 1000;
    return 0;
}

time_t time(time_t *at) {
    time_t seconds = (true_now() + *offset) / SECOND;
    if (at) *at = seconds;
    return seconds;
}

// The true time until which to wait now for a deadline of the shifted clock. ended: it is reached with this wait.
static struct timespec next_slice(const struct timespec *deadline, int *ended) {
    int64_t now = true_now(), left = nanoseconds(deadline) - (now + *offset);
    *ended = left <= SLICE;
    return timespec_of(now + (*ended ? left : SLICE));
}

int pthread_cond_timedwait(
    pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
    load();
    if (deadline->tv_sec < FIRST_WALL_SECOND) return real_cond_wait(cond, mutex, deadline);
    for (int ended = 0;;) {
        struct timespec slice = next_slice(deadline, &ended);
        int result = real_cond_wait(cond, mutex, &slice);
        if (result != ETIMEDOUT || ended) return result;
    }
}

int pthread_cond_clockwait(
    pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, clockid_t clock,
    const struct timespec *restrict deadline) {
    load();
    if (!is_wall(clock)) return real_cond_clockwait(cond, mutex, clock, deadline);
    for (int ended = 0;;) {
        struct timespec slice = next_slice(deadline, &ended);
        int result = real_cond_clockwait(cond, mutex, clock, &slice);
        if (result != ETIMEDOUT || ended) return result;
    }
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    load();
    for (int ended = 0;;) {
        struct timespec slice = next_slice(deadline, &ended);
        if (real_sem_wait(semaphore, &slice) == 0) return 0;
        if (errno != ETIMEDOUT || ended) return -1;
    }
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict deadline) {
    load();
    return is_wall(clock) ? sem_timedwait(semaphore, deadline) : real_sem_clockwait(semaphore, clock, deadline);
}

// Abseil, and gRPC with it, waits by calling futex itself.
long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long);
    long d = va_arg(list, long), e = va_arg(list, long), f = va_arg(list, long);
    va_end(list);
    load();
    if (number != SYS_futex || !(b & FUTEX_CLOCK_REALTIME) || (b & FUTEX_CMD_MASK) != FUTEX_WAIT_BITSET || !d)
        return real_syscall(number, a, b, c, d, e, f);
    for (int ended = 0;;) {
        struct timespec slice = next_slice((const struct timespec *)d, &ended);
        long result = real_syscall(number, a, b, c, (long)&slice, e, f);
        if (result == 0 || errno != ETIMEDOUT || ended) return result;
    }
}
