/* Lets connections fail as a host fails that has run out of something: while the file named by TEST_CONNECT_FAILS holds the number
 * of an error, every connect() over TCP ends with it. Loaded before the C library (LD_PRELOAD). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

int connect(int socket, const struct sockaddr *address, socklen_t length) {
    int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
    const char *path = getenv("TEST_CONNECT_FAILS");
    if (path && (address->sa_family == AF_INET || address->sa_family == AF_INET6)) {
        FILE *file = fopen(path, "re");
        int error = 0;
        if (file) {
            if (fscanf(file, "%d", &error) != 1) error = 0;
            fclose(file);
        }
        if (error) {
            errno = error;
            return -1;
        }
    }
    return real(socket, address, length);
}
