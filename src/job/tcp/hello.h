/* SPDX-License-Identifier: Apache-2.0 */
/* hello.h -- the first words on a connection, by which both ends prove that they know the job's
 * key.
 *
 *   guest -> host   greeting: who it is, whom it wants, a random number
 *   host -> guest   challenge: another random number, and the host's proof
 *   guest -> host   claim: the guest's proof, of the claim's bytes too
 *   host -> guest   answer: proof of the answer's bytes; at once, or when all guests have come
 *
 * Each proof is an HMAC of both random numbers, so none can be used again; each has its own
 * purpose, so that none can be sent back. A host hears its guests at the same time, at most
 * JOB_GUESTS of them, and each for JOB_HELLO_S: silent strangers delay no rank.
 *
 *   a guest at the host  until it has sent        then
 *   GREETS               its greeting             CLAIMS, with the challenge; or it is dismissed
 *   CLAIMS               its proof and its claim  admitted, with its connection; or dismissed
 *
 * Invariants (job_reception_validate): (1) there are at most JOB_GUESTS guests, each with a
 * separate connection; (2) a guest has sent less than its state wants: a complete message is judged
 * at once; (3) one that claims was challenged by this job. */
#ifndef BALLAST_JOB_TCP_HELLO_H
#define BALLAST_JOB_TCP_HELLO_H

#include "job/tcp/tcp.h"

enum { JOB_GUESTS = 128, JOB_NONCE_BYTES = 32, JOB_CLAIM_BYTES = 1024 };

static const double JOB_HELLO_S = 5.0;

typedef struct job_greeting {
    char magic[8];
    uint64_t job;
    int32_t n_ranks, from, to;
    int32_t claim_bytes;
    uint8_t nonce[JOB_NONCE_BYTES];
} job_greeting;

typedef struct job_challenge {
    char magic[8];
    int32_t n_ranks, unused;
    uint8_t nonce[JOB_NONCE_BYTES];
    job_mac proof; /* of n_ranks, too */
} job_challenge;

/* Why a host turns a guest away. */
typedef enum job_refusal {
    JOB_NO_REFUSAL,
    JOB_OTHER_VERSION, /* of these words */
    JOB_OTHER_JOB,
    JOB_OTHER_SIZE,   /* another number of ranks; the guest learns it */
    JOB_OTHER_SECRET, /* it did not prove to know the key, or did not take the host's proof */
    JOB_RANK_TAKEN    /* another process is that rank; the guest learns it */
} job_refusal;

/* The first words of one connection. */
typedef struct job_hello {
    const job_key *key;
    job_greeting greeting;
    uint8_t host_nonce[JOB_NONCE_BYTES];
    job_refusal refusal; /* a guest's, proved by the host */
    int32_t host_ranks;  /* of JOB_OTHER_SIZE */
} job_hello;

/* ---- the guest ---- */

/* Greets, reads the challenge (JOB_HELLO_S at most) and claims. False with errno; EKEYREJECTED: the
 * host has another key, or is not of this job. `hello` has key and greeting but its magic,
 * claim_bytes and nonce. */
bool job_hello_claim(int fd, job_hello *hello, const void *claim, size_t n_bytes, double deadline);
/* The host's answer, of n_bytes. */
bool job_hello_hear(int fd, job_hello *hello, void *answer, size_t n_bytes, double deadline);

/* ---- the host ---- */

bool job_hello_answer(int fd, const job_hello *hello, const void *answer, size_t n_bytes,
                      double deadline);
/* In place of an answer: JOB_RANK_TAKEN. */
void job_hello_refuse(int fd, const job_hello *hello, double deadline);

typedef struct job_guest job_guest;

typedef struct job_reception {
    const job_listener *listener;
    const job_key *key;
    uint64_t job;
    int n_ranks;
    size_t claim_bytes;
    bool (*expects)(void *user, int from, int to);
    /* A guest that has proved to know the key. True: fd, which is blocking, is taken over. */
    bool (*admits)(void *user, const job_hello *hello, const void *claim, int fd);
    /* A guest that greeted goes. Its words are not proved. NULL: nothing is done. */
    void (*turns_away)(void *user, const job_greeting *greeting, int fd, job_refusal why);
    void *user;
    int n_guests;
    job_guest *guests; /* [JOB_GUESTS] */
} job_reception;

bl_status job_reception_open(job_reception *reception); /* all but the last line is set */
void job_reception_close(job_reception *reception);     /* and connections of guests */
/* Hears guests until one has been admitted, or until `until`. BL_ELIMIT: no more descriptors;
 * BL_EIO. */
bl_status job_reception_wait(job_reception *reception, double until);
/* BL_EINTERNAL names the invariant that does not hold. Debug builds call it after each
 * transition. */
bl_status job_reception_validate(const job_reception *reception);

#endif
