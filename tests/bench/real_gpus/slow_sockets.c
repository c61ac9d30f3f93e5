/* Limits what a process sends over TCP to GPU_BENCH_GBIT Gbit/s, where the kernel cannot shape its links.
   Loaded with LD_PRELOAD; a token bucket in front of send(2), which NCCL's socket transport calls without blocking. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double tokens, last;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
    static ssize_t (*original)(int, const void *, size_t, int);
    static double rate, burst;
    pthread_mutex_lock(&lock);
    if (!original) {
        original = dlsym(RTLD_NEXT, "send");
        const char *text = getenv("GPU_BENCH_GBIT");
        rate = text ? atof(text) * 1e9 / 8 : 0;
        burst = rate * 0.008;
        tokens = burst;
        last = now();
    }
    if (rate <= 0 || size < 4096) {
        pthread_mutex_unlock(&lock);
        return original(fd, data, size, flags);
    }
    double time = now();
    tokens += (time - last) * rate;
    last = time;
    if (tokens > burst) tokens = burst;
    if (tokens < 4096) {
        pthread_mutex_unlock(&lock);
        errno = EAGAIN;
        return -1;
    }
    if (size > tokens) size = (size_t)tokens;
    ssize_t sent = original(fd, data, size, flags);
    if (sent > 0) tokens -= sent;
    pthread_mutex_unlock(&lock);
    return sent;
}
