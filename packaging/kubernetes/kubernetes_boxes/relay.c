/* relay SOCKET

Listen on a unix socket, and carry its connections over this program's input and output: frames of a connection's number,
a length (both 32 bits, big-endian) and so many bytes. The first frame of a connection is empty. Each further one of length
0 ends one direction of it, GONE both. The program ends with its input. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define MOST 128
#define GONE 0xffffffffu
#define WAITING (16u << 20)

static struct pollfd ends[MOST + 2]; /* 0: input, 1: the listener, from 2 on: connections */
static uint32_t numbers[MOST + 2], last; /* none is used twice: the other side may still speak of one that is gone */
static struct {
    char *data;
    size_t size;
    int end; /* then its output ends */
} queues[MOST + 2];
static size_t waiting; /* bytes in all queues */

static int put(int to, const char *data, size_t size) {
    while (size > 0) {
        ssize_t done = write(to, data, size);
        if (done < 0 && errno != EINTR)
            return 0;
        if (done > 0)
            data += done, size -= done;
    }
    return 1;
}

static int get(char *data, size_t size) {
    while (size > 0) {
        ssize_t done = read(0, data, size);
        if (done == 0 || (done < 0 && errno != EINTR))
            return 0;
        if (done > 0)
            data += done, size -= done;
    }
    return 1;
}

static void tell(uint32_t number, uint32_t size, const char *data) {
    uint32_t head[2] = {htonl(number), htonl(size)};
    if (!put(1, (char *)head, sizeof head) || (size != GONE && !put(1, data, size)))
        _exit(1);
}

static void drop(int i) {
    close(ends[i].fd);
    ends[i].fd = -1;
    waiting -= queues[i].size;
    free(queues[i].data);
    memset(&queues[i], 0, sizeof queues[i]);
}

static void flush(int i) {
    ssize_t done = send(ends[i].fd, queues[i].data, queues[i].size, MSG_DONTWAIT);
    if (done < 0 && errno != EAGAIN && errno != EINTR)
        done = queues[i].size; /* nobody reads it any more */
    if (done > 0) {
        memmove(queues[i].data, queues[i].data + done, queues[i].size -= done);
        waiting -= done;
    }
    if (queues[i].size > 0)
        ends[i].events |= POLLOUT;
    else {
        ends[i].events &= ~POLLOUT;
        if (queues[i].end)
            shutdown(ends[i].fd, SHUT_WR);
    }
}

static void lead(int i, const char *data, size_t size) {
    char *more = waiting + size > WAITING ? NULL : realloc(queues[i].data, queues[i].size + size);
    if (more == NULL) {
        tell(numbers[i], GONE, NULL);
        drop(i);
        return;
    }
    queues[i].data = more;
    memcpy(more + queues[i].size, data, size);
    queues[i].size += size;
    waiting += size;
    flush(i);
}

int main(int count, char **words) {
    static char data[1 << 16];
    struct sockaddr_un here = {.sun_family = AF_UNIX};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (count != 2 || strlen(words[1]) >= sizeof here.sun_path)
        return 2;
    signal(SIGPIPE, SIG_IGN);
    strcpy(here.sun_path, words[1]);
    unlink(words[1]);
    if (bind(listener, (struct sockaddr *)&here, sizeof here) || chmod(words[1], 0666) || listen(listener, MOST))
        return 3;
    for (int i = 0; i < MOST + 2; i++)
        ends[i] = (struct pollfd){i == 0 ? 0 : i == 1 ? listener : -1, POLLIN, 0};
    tell(0, 0, NULL); /* it listens */
    for (;;) {
        uint32_t head[2];
        int free = 2, at = 2;
        while (free < MOST + 2 && ends[free].fd >= 0)
            free++;
        ends[1].events = free < MOST + 2 ? POLLIN : 0;
        if (poll(ends, MOST + 2, -1) < 0)
            continue;
        if (ends[0].revents) {
            if (!get((char *)head, sizeof head))
                return 0;
            uint32_t size = ntohl(head[1]);
            while (at < MOST + 2 && (ends[at].fd < 0 || numbers[at] != ntohl(head[0])))
                at++;
            if (size == GONE && at < MOST + 2)
                drop(at);
            else if (size == 0 && at < MOST + 2) {
                queues[at].end = 1;
                flush(at);
            }
            for (uint32_t left = size == GONE ? 0 : size; left > 0;) {
                uint32_t part = left < sizeof data ? left : sizeof data;
                if (!get(data, part))
                    return 0;
                if (at < MOST + 2 && ends[at].fd >= 0)
                    lead(at, data, part);
                left -= part;
            }
        }
        for (int i = 2; i < MOST + 2; i++) {
            if (ends[i].fd >= 0 && ends[i].revents & POLLOUT)
                flush(i);
            if (ends[i].fd < 0 || !(ends[i].revents & ~POLLOUT))
                continue;
            ssize_t size = ends[i].events & POLLIN ? read(ends[i].fd, data, sizeof data) : 0;
            if (size > 0)
                tell(numbers[i], size, data);
            else if (size < 0 || ends[i].revents & (POLLHUP | POLLERR)) {
                tell(numbers[i], GONE, NULL);
                drop(i);
            } else { /* it says no more, and may still listen */
                tell(numbers[i], 0, NULL);
                ends[i].events &= ~POLLIN;
            }
        }
        if (ends[1].revents && ends[1].events) {
            int made = accept(listener, NULL, NULL);
            if (made >= 0) {
                ends[free] = (struct pollfd){made, POLLIN, 0};
                tell(numbers[free] = ++last, 0, NULL);
            }
        }
    }
}
