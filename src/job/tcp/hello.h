/* SPDX-License-Identifier: Apache-2.0 */
/* hello.h -- the first words on a connection, by which both ends prove that they know the job's key.
 *
 *   guest -> host   greeting: who it is, whom it wants, a random number
 *   host -> guest   challenge: another random number, and the host's proof
 *   guest -> host   claim: the guest's proof, of the claim's bytes too
 *   host -> guest   answer: proof of the answer's bytes; at once, or when all guests have come
 *
 * Each proof is an HMAC of both random numbers, so none can be used again; each has its own purpose, so that none can be sent back. A host hears its
 * guests at the same time, at most COMM_GUESTS of them, and each for COMM_HELLO_S: silent strangers delay no rank. */
#ifndef BALLAST_COMM_TCP_HELLO_H
#define BALLAST_COMM_TCP_HELLO_H

#include "comm/tcp/tcp.h"

enum { COMM_GUESTS = 128, COMM_NONCE_BYTES = 32, COMM_CLAIM_BYTES = 1024 };

static const double COMM_HELLO_S = 5.0;

typedef struct comm_greeting {
    char magic[8];
    uint64_t job;
    int32_t n_ranks, from, to;
    int32_t claim_bytes;
    uint8_t nonce[COMM_NONCE_BYTES];
} comm_greeting;

typedef struct comm_challenge {
    char magic[8];
    uint8_t nonce[COMM_NONCE_BYTES];
    comm_mac proof;
} comm_challenge;

/* The first words of one connection. */
typedef struct comm_hello {
    const comm_key *key;
    comm_greeting greeting;
    uint8_t host_nonce[COMM_NONCE_BYTES];
} comm_hello;

/* ---- the guest ---- */

/* Greets, hears the challenge (COMM_HELLO_S at most) and claims. False with errno; EKEYREJECTED: the host has another key, or is not of this job. `hello`
 * has key and greeting but its magic, claim_bytes and nonce. */
bool comm_hello_claim(int fd, comm_hello *hello, const void *claim, size_t n_bytes,
                      double deadline);
/* The host's answer, of n_bytes. */
bool comm_hello_hear(int fd, const comm_hello *hello, void *answer, size_t n_bytes,
                     double deadline);

/* ---- the host ---- */

bool comm_hello_answer(int fd, const comm_hello *hello, const void *answer, size_t n_bytes,
                       double deadline);

typedef struct comm_guest comm_guest;

typedef struct comm_reception {
    const comm_listener *listener;
    const comm_key *key;
    uint64_t job;
    int n_ranks;
    size_t claim_bytes;
    bool (*expects)(void *user, int from, int to);
    /* A guest that has proved to know the key. True: fd, which is blocking, is taken over. */
    bool (*admits)(void *user, const comm_hello *hello, const void *claim, int fd);
    void *user;
    int n_guests,
        n_rejected;     /* rejected: greeted as a rank of the job and did not prove to be one */
    comm_guest *guests; /* [COMM_GUESTS] */
} comm_reception;

bl_status comm_reception_open(comm_reception *reception); /* all but the last line is set */
void comm_reception_close(comm_reception *reception);     /* and connections of guests */
/* Hears guests until one has been admitted, or until `until`. BL_ELIMIT: no more descriptors; BL_EIO. */
bl_status comm_reception_wait(comm_reception *reception, double until);

#endif
