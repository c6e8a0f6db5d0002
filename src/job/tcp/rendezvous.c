/* SPDX-License-Identifier: Apache-2.0 */
/* rendezvous.c -- how processes that know one address find each other. Rank 0 listens at a port
 * that all know; each other rank tells it where it can be reached, and gets the list of all and a
 * number that makes the job's key. Then all are connected (mesh.c). */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "job/tcp/hello.h"

static const double TRY_S = 5.0;
/* The others wait a little longer for rank 0, which knows the missing ranks and should report
 * them. */
static const double LONGER_S = 30.0;
/* NFS caches a directory's entries for a minute at most. The secret of a variable does not change;
 * rank 0 of an earlier start may still be leaving. */
static const double SECRET_S = 65.0, FIXED_SECRET_S = 5.0;

/* Of a job of one host that has no directory: memory that every user may write to, and where a file
 * is its owner's alone. */
static const char LOCAL_DIR[] = "/dev/shm";

typedef struct rendezvous {
    const job_rendezvous *of;
    int rank, n;
    double deadline, limit_s;
    bool is_one_host, is_interface_chosen, has_secret;
    job_refusal refusal; /* rank 0's, proved */
    int host_ranks;
    int n_away[JOB_RANK_TAKEN + 1]; /* rank 0's: how many it turned away, by reason */
    bool is_refused;                /* rank 0 was reached, and has another secret, */
    double reached_s; /* or there is none yet; since when it is known to be there, or BL_NEVER_S */
    const char *secret_dir; /* NULL: none */
    char *secret_path;      /* rank 0's */
    job_key secret, key;
    job_patience patience;
    job_listener listener; /* for the mesh */
    job_place own;         /* as this rank knows it */
    job_place *places;     /* [n] */
    int *ranks_fd;         /* [n]: rank 0's, of those that have come */
    job_hello *hellos;     /* [n] */
} rendezvous;

static bl_status open_rendezvous(const job_rendezvous *of, rendezvous *m)
{
    const bl_launch_info *info = of->info;
    double limit_s = info->rank == 0 ? of->limit_s : of->limit_s + LONGER_S;

    *m = (rendezvous){.of = of,
                      .reached_s = BL_NEVER_S,
                      .rank = info->rank,
                      .n = info->n_processes,
                      .limit_s = limit_s,
                      .deadline = bl_now_s() + limit_s,
                      .is_one_host = info->n_local == info->n_processes};
    job_patience_begin(&m->patience, info);
    m->patience.speaks &= !of->is_quiet;
    m->secret_dir = of->dir ? of->dir : m->is_one_host ? LOCAL_DIR : NULL;
    m->places = calloc((size_t)m->n, sizeof *m->places);
    m->ranks_fd = malloc((size_t)m->n * sizeof *m->ranks_fd);
    m->hellos = calloc((size_t)m->n, sizeof *m->hellos);
    for (int i = 0; m->ranks_fd && i < m->n; i++) m->ranks_fd[i] = -1;
    if (!m->places || !m->ranks_fd || !m->hellos)
        return BL_FAIL(BL_ENOMEM, "the addresses of %d ranks", m->n);
    BL_TRY(job_place_open(info, m->rank, 1, &m->own, &m->is_interface_chosen, &m->listener));
    return job_random(&m->own.process, sizeof m->own.process);
}

static void close_visits(rendezvous *m)
{
    for (int i = 0; m->ranks_fd && i < m->n; i++) {
        if (m->ranks_fd[i] >= 0) close(m->ranks_fd[i]);
        m->ranks_fd[i] = -1;
    }
}

static void close_rendezvous(rendezvous *m)
{
    close_visits(m);
    if (m->secret_path) unlink(m->secret_path);
    job_tcp_close_listener(&m->listener);
    free(m->secret_path);
    free(m->places);
    free(m->ranks_fd);
    free(m->hellos);
}

/* The address over which rank 0 was met comes first: it certainly leads from one host to another.
 * Not so a host's own name for itself; nor is one wanted that is not of the chosen interface. */
static void prefer(const rendezvous *m, const job_address *address, job_place *place)
{
    int i = 0;

    if (job_address_is_loopback(address)) return;
    while (i < place->n_addresses && memcmp(&place->addresses[i], address, sizeof *address) != 0)
        i++;
    if (i == place->n_addresses) {
        if (m->is_interface_chosen) return;
        if (i < JOB_PLACE_ADDRESSES)
            place->n_addresses++;
        else
            i--; /* the last one gives way */
    }
    memmove(&place->addresses[1], &place->addresses[0], (size_t)i * sizeof place->addresses[0]);
    place->addresses[0] = *address;
}

/* Whether bytes of the network are what rank `rank` can have said of itself. */
static bool is_place_of(const job_place *place, int rank)
{
    return memchr(place->host, '\0', sizeof place->host) &&
           memchr(place->build, '\0', sizeof place->build) && place->first_rank == rank &&
           place->n_ranks == 1 && place->n_addresses >= 1 &&
           place->n_addresses <= JOB_PLACE_ADDRESSES;
}

/* Where the job has none, its number is not secret: it only keeps jobs apart. */
static void use_no_secret(rendezvous *m)
{
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)m->of->job);
    job_key_of(text, &m->secret);
    m->has_secret = true;
}

/* ---- rank 0 ---- */

static bl_status create_secret(rendezvous *m)
{
    if (m->of->secret) {
        job_key_of(m->of->secret, &m->secret);
        return BL_OK;
    }
    if (m->secret_dir)
        return job_secret_create(m->secret_dir, m->of->job, &m->secret_path, &m->secret);
    use_no_secret(m);
    bl_log_warning("BALLAST_SECRET is not set: any process that reaches port %d of this host can "
                   "join the job; set it to the same text on all ranks",
                   m->of->port);
    return BL_OK;
}

/* The ranks that have not come, as "1, 3"; returns how many. */
static int list_missing(const rendezvous *m, char *list, size_t list_bytes)
{
    size_t used = 0;
    int n_missing = 0;

    list[0] = '\0';
    for (int i = 1; i < m->n; i++) {
        if (m->ranks_fd[i] >= 0) continue;
        if (used < list_bytes - 16)
            used += (size_t)snprintf(list + used, list_bytes - used, "%s%d", used ? ", " : "", i);
        n_missing++;
    }
    return n_missing;
}

static bl_status say_missing(const rendezvous *m)
{
    char list[128], hint[128] = "";
    int n_missing = list_missing(m, list, sizeof list), n_rejected = m->n_away[JOB_OTHER_SECRET];

    if (n_rejected > 0)
        snprintf(hint, sizeof hint,
                 "; %d connections did not know the job's secret (BALLAST_SECRET, or output_dir)",
                 n_rejected);
    return BL_FAIL(BL_ERANK, "%s %s did not come to %s port %d within %.0f s%s",
                   n_missing == 1 ? "rank" : "ranks", list, m->of->address, m->of->port, m->limit_s,
                   hint);
}

static bool expects(void *user, int from, int to)
{
    const rendezvous *m = user;
    return to == 0 && from >= 1 && from < m->n;
}

/* Logs it once for each reason. One that has read an older secret comes again with the new one. */
static void turns_away(void *user, const job_greeting *greeting, int fd, job_refusal why)
{
    rendezvous *m = user;
    char reason[160], text[JOB_ADDRESS_TEXT_BYTES] = "an unknown address";
    struct sockaddr_storage storage;
    socklen_t n = sizeof storage;
    job_address address;

    if (++m->n_away[why] != (why == JOB_OTHER_SECRET ? 2 : 1) || !m->patience.speaks) return;
    if (getpeername(fd, (struct sockaddr *)&storage, &n) == 0 &&
        job_address_read((struct sockaddr *)&storage, &address))
        job_address_format(&address, text);
    if (why == JOB_OTHER_SIZE)
        snprintf(reason, sizeof reason, "it has %d ranks (WORLD_SIZE), this job has %d",
                 greeting->n_ranks, m->n);
    else
        snprintf(reason, sizeof reason, "%s",
                 why == JOB_OTHER_VERSION ? "it is another version of Ballast"
                 : why == JOB_OTHER_JOB   ? "it is of another job (TORCHELASTIC_RUN_ID)"
                 : why == JOB_RANK_TAKEN  ? "another process has that rank (RANK)"
                                          : "it does not know the job's secret (BALLAST_SECRET, or "
                                            "output_dir)");
    bl_log_warning("turned away a process of %s that claims to be rank %d: %s", text,
                   greeting->from, reason);
}

static bool is_connected(int fd)
{
    char byte;
    ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n > 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
}

/* A rank that comes again has lost its first connection; another process of its number has not. */
static bool admits(void *user, const job_hello *hello, const void *claim, int fd)
{
    rendezvous *m = user;
    int rank = hello->greeting.from;
    job_place place;

    memcpy(&place, claim, sizeof place);
    if (!is_place_of(&place, rank)) return false;
    if (m->ranks_fd[rank] >= 0 && m->places[rank].process != place.process &&
        is_connected(m->ranks_fd[rank])) {
        job_hello_refuse(fd, hello, bl_now_s() + 1.0); /* a new connection has room for it */
        turns_away(m, &hello->greeting, fd, JOB_RANK_TAKEN);
        return false;
    }
    if (m->ranks_fd[rank] >= 0) close(m->ranks_fd[rank]);
    m->places[rank] = place;
    m->ranks_fd[rank] = fd;
    m->hellos[rank] = *hello;
    return true;
}

/* The answer: a random number for the job's key, and the places. */
static bl_status tell_all(rendezvous *m)
{
    size_t n_places_bytes = (size_t)m->n * sizeof *m->places;
    uint8_t *words = malloc(JOB_KEY_BYTES + n_places_bytes);
    bl_status st = words ? job_random(words, JOB_KEY_BYTES)
                         : BL_FAIL(BL_ENOMEM, "the addresses of %d ranks", m->n);

    if (st == BL_OK) {
        job_key_derive(&m->secret, words, &m->key);
        memcpy(words + JOB_KEY_BYTES, m->places, n_places_bytes);
    }
    for (int i = 1; i < m->n && st == BL_OK; i++)
        if (!job_hello_answer(m->ranks_fd[i], &m->hellos[i], words, JOB_KEY_BYTES + n_places_bytes,
                              m->deadline))
            st = bl_fail_errno(BL_ERANK, "rank %d on host %s went away while ranks met", i,
                               m->places[i].host);
    free(words);
    return st;
}

static bl_status gather(rendezvous *m, const job_listener *door)
{
    job_reception r = {.listener = door,
                       .key = &m->secret,
                       .job = m->of->job,
                       .n_ranks = m->n,
                       .claim_bytes = sizeof(job_place),
                       .expects = expects,
                       .admits = admits,
                       .turns_away = turns_away,
                       .user = m};
    char list[128];
    int n_missing;

    BL_TRY(job_reception_open(&r));
    bl_status st = BL_OK;
    while (st == BL_OK && (n_missing = list_missing(m, list, sizeof list)) > 0) {
        double now_s = bl_now_s();
        if (now_s >= m->deadline) {
            st = say_missing(m);
            break;
        }
        job_patience_log(&m->patience, "%s %s to come to %s port %d, at most %.0f s",
                         n_missing == 1 ? "rank" : "ranks", list, m->of->address, m->of->port,
                         m->limit_s);
        st = job_reception_wait(&r, now_s + 1.0 < m->deadline ? now_s + 1.0 : m->deadline);
    }
    job_reception_close(&r);
    return st;
}

static void add_address(const job_address *address, job_place *place)
{
    for (int i = 0; i < place->n_addresses; i++)
        if (memcmp(&place->addresses[i], address, sizeof *address) == 0) return;
    if (place->n_addresses < JOB_PLACE_ADDRESSES) place->addresses[place->n_addresses++] = *address;
}

/* Of a chosen interface its addresses, and those that this host has of rank 0's name, at which
 * others look for it. */
static bl_status open_door(const rendezvous *m, job_listener *door)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL;
    job_place at = m->own;
    job_address address;

    if (m->is_interface_chosen && getaddrinfo(m->of->address, NULL, &hints, &list) == 0) {
        for (const struct addrinfo *i = list; i; i = i->ai_next)
            if (job_address_read(i->ai_addr, &address)) add_address(&address, &at);
        freeaddrinfo(list);
    }
    bool binds = m->is_one_host || m->is_interface_chosen;
    bl_status st = job_tcp_listen(at.addresses, binds ? at.n_addresses : 0, m->of->port, door);
    return st == BL_OK ? st
                       : bl_error_prefix(st, "the port at which ranks meet (%s)", m->of->port_key);
}

static bl_status receive_all(rendezvous *m)
{
    job_listener door = {.n = 0};

    m->places[0] = m->own;
    bl_status st = create_secret(m);
    if (st == BL_OK) st = open_door(m, &door);
    if (st == BL_OK) st = gather(m, &door);
    if (st == BL_OK) st = tell_all(m);
    close_visits(m);
    job_tcp_close_listener(&door);
    return st;
}

/* ---- the others ---- */

/* Before each visit: the file may be a new one. */
static bl_status find_secret(rendezvous *m)
{
    if (m->of->secret) {
        job_key_of(m->of->secret, &m->secret);
        m->has_secret = true;
    } else if (m->secret_dir) {
        BL_TRY(job_secret_read(m->secret_dir, m->of->job, &m->secret, &m->has_secret));
    } else {
        use_no_secret(m);
    }
    return BL_OK;
}

/* Rank 0's answer on fd. False with errno; EPROTO: it is another process's. */
static bool hear_answer(rendezvous *m, int fd, job_hello *hello)
{
    size_t n_places_bytes = (size_t)m->n * sizeof *m->places;
    uint8_t *words = malloc(JOB_KEY_BYTES + n_places_bytes);
    bool is_heard =
        words && job_hello_hear(fd, hello, words, JOB_KEY_BYTES + n_places_bytes, m->deadline);

    if (is_heard) {
        job_key_derive(&m->secret, words, &m->key);
        memcpy(m->places, words + JOB_KEY_BYTES, n_places_bytes);
        for (int i = 0; i < m->n; i++)
            if (!is_place_of(&m->places[i], i)) is_heard = false, errno = EPROTO;
    }
    free(words);
    return is_heard;
}

/* One connection to rank 0, through all of it. False with errno: try again. */
static bool visit(rendezvous *m, const job_address *master)
{
    double try_until = bl_now_s() + TRY_S;
    job_place place = m->own;
    job_hello hello = {.key = &m->secret,
                       .greeting = {.job = m->of->job, .n_ranks = m->n, .from = m->rank}};
    int fd =
        job_tcp_connect(master, m->of->port, try_until < m->deadline ? try_until : m->deadline);

    if (fd < 0) return false;
    if (m->reached_s == BL_NEVER_S) m->reached_s = bl_now_s();
    job_address address;
    if (job_tcp_own_address(fd, &address)) prefer(m, &address, &place);
    errno = ENOKEY;
    bool is_claimed =
        m->has_secret && job_hello_claim(fd, &hello, &place, sizeof place, m->deadline);
    m->is_refused = !is_claimed && (errno == ENOKEY || errno == EKEYREJECTED);
    bool is_done = is_claimed && hear_answer(m, fd, &hello);
    int code = errno;
    close(fd);
    m->refusal = hello.refusal;
    m->host_ranks = hello.host_ranks;
    if (is_done) prefer(m, master, &m->places[0]);
    errno = code;
    return is_done;
}

static bool try_addresses(rendezvous *m, const struct addrinfo *list)
{
    errno = EAFNOSUPPORT;
    for (; list; list = list->ai_next) {
        job_address address;
        if (job_address_read(list->ai_addr, &address) && visit(m, &address)) return true;
    }
    return false;
}

/* False: *found is of getaddrinfo and, if that has found it, *code is an errno. */
static bool try_master(rendezvous *m, int *found, int *code)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL;

    *found = 0;
    if (m->is_one_host) {
        bool is_done = visit(m, &job_loopback);
        *code = errno;
        return is_done;
    }
    *found = getaddrinfo(m->of->address, NULL, &hints, &list);
    if (*found != 0) return false;
    bool is_done = try_addresses(m, list);
    *code = errno;
    freeaddrinfo(list);
    return is_done;
}

/* Rank 0 writes the secret before it listens: who reaches it, and does not see that file in time,
 * looks elsewhere. */
static bl_status check_secret(const rendezvous *m)
{
    double limit_s = m->of->secret ? FIXED_SECRET_S : SECRET_S;

    if (!m->is_refused || bl_now_s() - m->reached_s < limit_s) return BL_OK;
    if (m->of->secret || !m->of->dir)
        return BL_FAIL(BL_EUSAGE,
                       "rank %d and rank 0, which listens at %s port %d, have different secrets: "
                       "set BALLAST_SECRET to the same text on all ranks",
                       m->rank, m->of->address, m->of->port);
    return BL_FAIL(
        BL_EUSAGE,
        "rank %d does not see the secret of rank 0 (%s port %d) in output_dir %.400s: it "
        "must be on a file system that all hosts share, or all ranks need BALLAST_SECRET",
        m->rank, m->of->address, m->of->port, m->of->dir);
}

/* To come again does not help. */
static bl_status check_refusal(const rendezvous *m)
{
    if (m->refusal == JOB_OTHER_SIZE)
        return BL_FAIL(
            BL_EUSAGE,
            "rank %d has %d ranks and rank 0, at %s port %d, has %d: set the same number "
            "(WORLD_SIZE) on all",
            m->rank, m->n, m->of->address, m->of->port, m->host_ranks);
    if (m->refusal == JOB_RANK_TAKEN)
        return BL_FAIL(BL_EUSAGE,
                       "another process is rank %d for rank 0, at %s port %d: give each process "
                       "another rank (RANK)",
                       m->rank, m->of->address, m->of->port);
    return check_secret(m);
}

static bl_status visit_master(rendezvous *m)
{
    const struct timespec pause = {0, 200 * 1000 * 1000};
    int found, code = 0;

    for (;;) { /* a name may be known a little later, too */
        BL_TRY(find_secret(m));
        if (try_master(m, &found, &code)) return BL_OK;
        bool is_limit = found == 0 && job_tcp_is_limit(code);
        errno = code;
        if (is_limit) return bl_fail_errno(BL_ELIMIT, "the connection to rank 0");
        BL_TRY(check_refusal(m));
        if (bl_now_s() >= m->deadline) break;
        job_patience_log(&m->patience, "rank 0 at %s port %d, at most %.0f s: %s", m->of->address,
                         m->of->port, m->limit_s,
                         found != 0      ? gai_strerror(found)
                         : m->is_refused ? "it has another secret"
                                         : strerror(code));
        nanosleep(&pause, NULL);
    }
    if (found != 0)
        return BL_FAIL(BL_ERANK, "%s (rank 0's address): %s", m->of->address, gai_strerror(found));
    errno = code;
    return bl_fail_errno(BL_ERANK, "rank 0 was not met at %s port %d within %.0f s", m->of->address,
                         m->of->port, m->limit_s);
}

/* ---- */

static bl_status connect_all(rendezvous *m, int *sockets)
{
    job_mesh mesh = {.key = &m->key,
                     .places = m->places,
                     .n_places = m->n,
                     .own = m->rank,
                     .listener = &m->listener,
                     .info = m->of->is_quiet ? NULL : m->of->info,
                     .limit_s = JOB_CONNECT_S};

    BL_TRY(job_place_compare_builds(m->places, m->n, m->rank, m->of->is_quiet));
    return job_mesh_connect_ranks(&mesh, sockets);
}

bl_status job_rendezvous_connect(const job_rendezvous *of, int *sockets)
{
    rendezvous m;

    for (int i = 0; i < of->info->n_processes; i++) sockets[i] = -1;
    if (of->secret && strlen(of->secret) < JOB_SECRET_MIN_BYTES)
        return BL_FAIL(BL_EUSAGE, "the secret (BALLAST_SECRET) has fewer than %d characters",
                       JOB_SECRET_MIN_BYTES);
    job_host_allow_descriptors((size_t)of->info->n_processes);
    bl_status st = open_rendezvous(of, &m);
    if (st == BL_OK) st = m.rank == 0 ? receive_all(&m) : visit_master(&m);
    if (st == BL_OK) st = connect_all(&m, sockets);
    close_rendezvous(&m);
    return st;
}
