/* forward PROGRAM [ARGUMENT ...]

Run a program that knows only TCP, and lead what it sends to a port of this machine's own loopback to the unix socket
that the variable FORWARD_SOCKET names.
WORD in the program's arguments and in its environment becomes the number of that port. The exit status is the
program's. Everything ends with the program, and the program with this one.

What the session's proxy sends is taken from the unix socket only after the program has taken it from its own: until then
it is looked at (MSG_PEEK) and sent on. So the proxy, which asks the kernel what has not been read
(rollout/proxy/delivery.py), is told the truth: a reply that the program did not take is not taken here either, and the
end of its connection is an end with something unread. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORD "\x1fport\x1f" /* rollout/agent/forward.py */
#define LONGEST_PAUSE 16 /* ms between two looks at a program that is slow to read */
#define SETTLING 5       /* s in which connections may end after the program's end */

extern char **environ;

static void fail(const char *what) {
    fprintf(stderr, "forward: %s: %s\n", what, strerror(errno));
    exit(127);
}

/* Return the bytes that a connection's other end, a socket of this machine, has not taken yet; -1 if it is not there. */
static long unread(int mine, int other) {
    static const char *lists[] = {"/proc/net/tcp", "/proc/net/tcp6"};
    char line[512];
    for (int i = 0; i < 2; i++) {
        FILE *list = fopen(lists[i], "re");
        while (list && fgets(line, sizeof line, list)) {
            unsigned local, remote, received;
            if (sscanf(line, " %*[^:]: %*[^:]:%X %*[^:]:%X %*X %*[^:]:%X", &local, &remote, &received) == 3 &&
                local == (unsigned)other && remote == (unsigned)mine) {
                fclose(list);
                return received;
            }
        }
        if (list)
            fclose(list);
    }
    return -1;
}

/* Tell whether the program has taken all that it was sent: 1 yes, 0 not yet, -1 it never will. */
static int taken(int tcp, int mine, int other) {
    int left = 1;
    ioctl(tcp, SIOCOUTQ, &left); /* what its kernel has not acknowledged */
    long kept = left ? 1 : unread(mine, other);
    /* An end that is closed with something unread sends a reset. So this is looked at last. */
    struct tcp_info info;
    socklen_t size = sizeof info;
    if (getsockopt(tcp, IPPROTO_TCP, TCP_INFO, &info, &size) ||
        (info.tcpi_state != TCP_ESTABLISHED && info.tcpi_state != TCP_CLOSE_WAIT))
        return -1;
    return !left && (kept == 0 || (kept < 0 && info.tcpi_state == TCP_CLOSE_WAIT));
}

static int sent(int to, const char *data, ssize_t size) {
    while (size > 0) {
        ssize_t done = send(to, data, size, MSG_NOSIGNAL);
        if (done < 0 && errno != EINTR)
            return 0;
        if (done > 0)
            data += done, size -= done;
    }
    return 1;
}

/* Lead one connection to the socket until one side has ended. Both ends are closed by this process's end: with something
unread in them, if there is. */
static void relay(int tcp, int session, int mine, int other) {
    static char data[1 << 16];
    ssize_t held = 0; /* bytes that the program was sent, and that the session is not yet told of */
    int open = 1;     /* the program may still send something */
    int pause = 1;
    for (;;) {
        struct pollfd ends[2] = {{open ? tcp : -1, POLLIN, 0}, {held ? -1 : session, POLLIN, 0}};
        if (poll(ends, 2, held ? pause : -1) < 0 && errno != EINTR)
            return;
        if (ends[0].revents) {
            ssize_t size = recv(tcp, data, sizeof data, 0);
            if (size < 0)
                return;
            if (size == 0)
                open = 0;
            else if (!sent(session, data, size))
                shutdown(tcp, SHUT_RD); /* the session reads no more; what it says is still led on */
        }
        if (ends[1].revents) {
            held = recv(session, data, sizeof data, MSG_PEEK);
            if (held <= 0 || !sent(tcp, data, held))
                return;
            pause = 1;
        }
        if (held) {
            int took = taken(tcp, mine, other);
            if (took < 0)
                return;
            pause = pause < LONGEST_PAUSE ? 2 * pause : pause;
            if (took && recv(session, data, held, 0) != held)
                return;
            held = took ? 0 : held;
        }
        if (!open && !held)
            shutdown(session, SHUT_WR); /* not before it is known what was read */
    }
}

static void serve(int listener, int port, int running, const char *path) {
    struct pollfd ends[2] = {{listener, POLLIN, 0}, {running, POLLIN, 0}};
    signal(SIGCHLD, SIG_IGN); /* nobody waits for each of them */
    while (poll(ends, 2, -1) >= 0 || errno == EINTR) {
        if (ends[1].revents)
            break; /* the program has ended */
        struct sockaddr_in from;
        socklen_t size = sizeof from;
        int tcp = accept4(listener, (struct sockaddr *)&from, &size, SOCK_CLOEXEC);
        if (tcp < 0)
            continue;
        if (fork() == 0) {
            struct sockaddr_un to = {.sun_family = AF_UNIX};
            int session = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            close(listener);
            strncpy(to.sun_path, path, sizeof to.sun_path - 1);
            setsockopt(tcp, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            if (connect(session, (struct sockaddr *)&to, sizeof to) == 0)
                relay(tcp, session, port, ntohs(from.sin_port));
            _exit(0);
        }
        close(tcp);
    }
    close(listener);
    alarm(SETTLING); /* its connections end with the program, but for those that it has left to others */
    while (wait(NULL) > 0 || errno == EINTR)
        ;
}

/* Return a text with the port's number in place of WORD. */
static char *told(char *text, int port) {
    char *at;
    while ((at = strstr(text, WORD))) {
        char *next;
        if (asprintf(&next, "%.*s%d%s", (int)(at - text), text, port, at + strlen(WORD)) < 0)
            fail("memory");
        text = next;
    }
    return text;
}

int main(int count, char **words) {
    const char *path = getenv("FORWARD_SOCKET");
    if (count < 2 || (path && strlen(path) >= sizeof((struct sockaddr_un *)0)->sun_path)) {
        fprintf(stderr, "usage: FORWARD_SOCKET=PATH forward PROGRAM [ARGUMENT ...]\n");
        return 127;
    }
    if (!path) {
        execvp(words[1], words + 1);
        fail(words[1]);
    }
    if (access("/proc/net/tcp", R_OK))
        fail("/proc/net/tcp, which tells what was read");
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof here;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), running[2], status;
    if (listener < 0 || bind(listener, (struct sockaddr *)&here, size) || listen(listener, 128) ||
        getsockname(listener, (struct sockaddr *)&here, &size) || pipe(running))
        fail("no port on the loopback");
    int port = ntohs(here.sin_port);

    pid_t relays = fork();
    if (relays == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(running[1]);
        for (int i = 0; i < 3; i++)
            close(i); /* whoever reads the program's output waits for its end, not for ours */
        serve(listener, port, running[0], path);
        _exit(0);
    }
    pid_t program = relays < 0 ? -1 : fork();
    if (program == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(running[0]);
        close(running[1]);
        unsetenv("FORWARD_SOCKET");
        for (char **one = words + 1; *one; one++)
            *one = told(*one, port);
        for (char **one = environ; *one; one++)
            *one = told(*one, port);
        execvp(words[1], words + 1);
        fail(words[1]);
    }
    if (program < 0)
        fail("no process");
    close(listener);
    close(running[0]);
    while (waitpid(program, &status, 0) < 0)
        if (errno != EINTR)
            fail("waiting");
    close(running[1]);
    waitpid(relays, NULL, 0);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
