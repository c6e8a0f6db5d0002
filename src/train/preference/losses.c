/* SPDX-License-Identifier: Apache-2.0 */
/* losses.c -- each loss and its derivatives by the sums over an answer; then over a micro-batch. */
#include "train/preference/losses.h"

#include <math.h>
#include <string.h>

#include "base/sizes.h"

/* ---- functions ---- */

static double sigmoid(double x)
{
    return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x));
}

static double log_sigmoid(double x)
{
    return x >= 0 ? -log1p(exp(-x)) : x - log1p(exp(x));
}

/* ---- an answer ---- */

typedef struct answer {
    int64_t document;
    int64_t begin, end; /* tokens of the micro-batch */
    int64_t n_shared;   /* of its tokens, those that ld_alpha leaves as they are */
    double n, n_scored; /* tokens of the answer; those that a token predicts */
    double score;       /* r, or the s of losses without reference */
    double mean, sum;   /* of logp: m; s */
    /* The losses' derivatives, times the number of pairs: by s, and by each token's logp. */
    double by_sum, by_token;
} answer;

static bool is_scored(const bl_preference_micro *m, int64_t t)
{
    return m->marks[t] & BL_MARK_ANSWER;
}

static answer begin_answer(const bl_preference_micro *m, int64_t document)
{
    answer a = {.document = document, .begin = m->ends[document], .end = m->ends[document + 1]};

    for (int64_t t = a.begin; t < a.end; t++) a.n_scored += is_scored(m, t);
    a.n_shared = (int64_t)a.n_scored;
    a.n = a.n_scored + (m->marks[a.begin] & BL_MARK_BEGINS ? 1 : 0);
    return a;
}

/* s(y) of log-probabilities of the micro-batch's tokens. */
static double sum_answer(const bl_preference_micro *m, const float *logp, double ld_alpha,
                         const answer *a)
{
    double sum = 0;
    int64_t k = 0;

    for (int64_t t = a->begin; t < a->end; t++)
        if (is_scored(m, t)) sum += (k++ < a->n_shared ? 1 : ld_alpha) * (double)logp[t];
    return sum;
}

static void score(const bl_preference_micro *m, double ld_alpha, answer *a)
{
    double reference = 0;

    if (m->reference_sums)
        reference = m->reference_sums[a->document];
    else if (m->reference)
        reference = sum_answer(m, m->reference, ld_alpha, a);
    a->sum = sum_answer(m, m->policy, ld_alpha, a);
    a->mean = sum_answer(m, m->policy, 1, a) / a->n_scored;
    a->score = a->sum - reference;
}

/* ---- losses of a pair ---- */

/* The losses of a pair that depend on c and d alone; dc, dd: derivatives. */
typedef struct pair_loss {
    double value, dc, dd;
} pair_loss;

/* f(x) with x = scale_c c - scale_d d. */
static pair_loss of_margin(double value, double slope, double scale_c, double scale_d)
{
    return (pair_loss){value, slope * scale_c, -slope * scale_d};
}

static pair_loss negative_log_sigmoid(double x, double scale_c, double scale_d)
{
    return of_margin(-log_sigmoid(x), -sigmoid(-x), scale_c, scale_d);
}

static pair_loss robust(double x, double beta, double e)
{
    double scale = 1 / (1 - 2 * e);
    return of_margin(scale * (-(1 - e) * log_sigmoid(x) + e * log_sigmoid(-x)),
                     -scale * ((1 - e) * sigmoid(-x) + e * sigmoid(x)), beta, beta);
}

/* S(x) has the slope S(x) S(-x). */
static double sigmoid_slope(double x)
{
    return sigmoid(x) * sigmoid(-x);
}

/* c, d: scores; n_c, n_d: tokens. */
static pair_loss loss_of_scores(const bl_losses *l, bl_loss loss, double c, double d, double n_c,
                                double n_d)
{
    double b = l->beta, x = b * (c - d);
    n_c = fmax(1, n_c), n_d = fmax(1, n_d);

    switch (loss) {
    case BL_LOSS_SIGMOID:
        return negative_log_sigmoid(x, b, b);
    case BL_LOSS_HINGE:
        return of_margin(fmax(0, 1 - x), 1 - x > 0 ? -1 : 0, b, b);
    case BL_LOSS_IPO:
        x = c / n_c - d / n_d - 1 / (2 * b);
        return of_margin(x * x, 2 * x, 1 / n_c, 1 / n_d);
    case BL_LOSS_SIGMOID_NORM:
        return negative_log_sigmoid(b * (c / n_c - d / n_d), b / n_c, b / n_d);
    case BL_LOSS_ROBUST:
        return robust(x, b, l->label_smoothing);
    case BL_LOSS_APO_ZERO:
        return (pair_loss){1 - sigmoid(b * c) + sigmoid(b * d), -b * sigmoid_slope(b * c),
                           b * sigmoid_slope(b * d)};
    case BL_LOSS_APO_DOWN:
        return (pair_loss){sigmoid(b * c) + 1 - sigmoid(x),
                           b * (sigmoid_slope(b * c) - sigmoid_slope(x)), b * sigmoid_slope(x)};
    default:
        return (pair_loss){0, 0, 0};
    }
}

/* -b log S(x), x = odds(m_c) - odds(m_d). With q = 1 - e^m, odds(m) = m - log q has the slope
 * 1 / q, and S(-x) = e^m_d q_c / (e^m_c q_d + e^m_d q_c): their product is finite where q_c
 * vanishes. */
static pair_loss odds_ratio(double b, double m_c, double m_d)
{
    /* A logp above -2^-25 may be 0: the loss head rounds 1 + 2^-24 and less to 1. */
    static const double MOST = -0x1p-25;
    m_c = fmin(m_c, MOST), m_d = fmin(m_d, MOST);
    double q_c = -expm1(m_c), q_d = -expm1(m_d), x = m_c - log(q_c) - (m_d - log(q_d)),
           divisor = q_c + exp(m_c - m_d) * q_d;

    return (pair_loss){-b * log_sigmoid(x), -b / divisor, b * q_c / q_d / divisor};
}

/* m_c, m_d: mean log-probabilities, by which the derivatives are. */
static pair_loss loss_of_means(const bl_losses *l, bl_loss loss, double m_c, double m_d)
{
    double e = l->label_smoothing, b = l->beta;

    if (loss == BL_LOSS_SIMPO) {
        double x = b * (m_c - m_d) - l->simpo_gamma;
        return of_margin(-(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x),
                         -(1 - e) * sigmoid(-x) + e * sigmoid(x), b, b);
    }
    if (loss == BL_LOSS_ORPO) return odds_ratio(b, m_c, m_d);
    return (pair_loss){0, 0, 0};
}

double bl_preference_loss_at_start(const bl_losses *l)
{
    double sum = 0;

    for (int i = 0; i < l->n_terms && l->has_reference && !l->is_unpaired; i++)
        sum += l->term[i].weight * loss_of_scores(l, l->term[i].loss, 0, 0, 1, 1).value;
    return sum;
}

/* The pair's losses less those at the start. */
static double weigh_pair(const bl_losses *l, answer *c, answer *d)
{
    double sum = 0;

    for (int i = 0; i < l->n_terms; i++) {
        double w = l->term[i].weight;
        bl_loss loss = l->term[i].loss;
        pair_loss of_scores = loss_of_scores(l, loss, c->score, d->score, c->n, d->n),
                  of_means = loss_of_means(l, loss, c->mean, d->mean);
        sum += w * (of_scores.value - loss_of_scores(l, loss, 0, 0, 1, 1).value + of_means.value);
        c->by_sum += w * of_scores.dc;
        d->by_sum += w * of_scores.dd;
        c->by_token += w * of_means.dc / c->n_scored;
        d->by_token += w * of_means.dd / d->n_scored;
    }
    return sum;
}

static double weigh_unpaired(const bl_losses *l, double kl, bool is_desirable, answer *a)
{
    double sign = is_desirable ? 1 : -1, x = sign * l->beta * (a->score - kl),
           w = l->term[0].weight * (is_desirable ? l->desirable_weight : l->undesirable_weight);

    a->by_sum = -w * sign * l->beta * sigmoid_slope(x);
    return w * (1 - sigmoid(x));
}

/* ---- a micro-batch ---- */

/* Of sft and orpo: the mean over all of the micro-batch's tokens that carry loss, of chosen
 * answers. */
typedef struct likelihood {
    double by_answer, by_prompt; /* derivative by a token's logp, both less than 0 or 0 */
    double value;
} likelihood;

static likelihood likelihood_of(const bl_losses *l, const bl_preference_micro *m)
{
    double n_answer = 0, n_prompt = 0, answers = 0, prompts = 0;
    likelihood out = {0, 0, 0};

    for (int64_t document = 0; document < m->n_documents; document += 2)
        for (int64_t t = m->ends[document]; t < m->ends[document + 1]; t++) {
            bool is_prompt = m->marks[t] & BL_MARK_PROMPT;
            if (!is_prompt && !is_scored(m, t)) continue;
            *(is_prompt ? &n_prompt : &n_answer) += 1;
            *(is_prompt ? &prompts : &answers) += (double)m->policy[t];
        }
    for (int i = 0; i < l->n_terms; i++) {
        double w = l->term[i].weight, n = n_answer + n_prompt;
        if (l->term[i].loss == BL_LOSS_SFT) {
            out.value -= w * answers / n_answer;
            out.by_answer -= w / n_answer;
        } else if (l->term[i].loss == BL_LOSS_ORPO) {
            out.value -= w * (answers + prompts) / n;
            out.by_answer -= w / n;
            out.by_prompt -= w / n;
        }
    }
    return out;
}

/* is_chosen: of a pair. */
static void write_weights(const bl_losses *l, const bl_preference_micro *m, const answer *a,
                          double n_rows, const likelihood *nll)
{
    double by_answer = nll ? nll->by_answer : 0;
    int64_t k = 0;

    for (int64_t t = a->begin; t < a->end; t++) {
        double slope = 0;
        if (is_scored(m, t)) {
            double factor = k++ < a->n_shared ? 1 : l->ld_alpha;
            slope = (factor * a->by_sum + a->by_token) / n_rows + by_answer;
        } else if (nll && m->marks[t] & BL_MARK_PROMPT) {
            slope = nll->by_prompt;
        }
        m->weights[t] = (float)-slope;
    }
}

static void count(const bl_losses *l, const answer *a, bool is_chosen, bl_preference_sums *sums)
{
    double logp = l->has_reference ? a->sum : a->mean,
           reward = l->beta * (l->has_reference ? a->score : a->mean);

    *(is_chosen ? &sums->n_chosen : &sums->n_rejected) += 1;
    *(is_chosen ? &sums->rewards_chosen : &sums->rewards_rejected) += reward;
    *(is_chosen ? &sums->logps_chosen : &sums->logps_rejected) += logp;
}

static double weigh_pairs(const bl_losses *l, const bl_preference_micro *m,
                          bl_preference_sums *sums)
{
    likelihood nll = likelihood_of(l, m);
    double n_pairs = (double)(m->n_documents / 2), loss = 0;

    for (int64_t i = 0; i < m->n_documents; i += 2) {
        answer c = begin_answer(m, i), d = begin_answer(m, i + 1);
        c.n_shared = d.n_shared = bl_min_i64(c.n_shared, d.n_shared);
        score(m, l->ld_alpha, &c);
        score(m, l->ld_alpha, &d);
        loss += weigh_pair(l, &c, &d);
        count(l, &c, true, sums);
        count(l, &d, false, sums);
        bool is_accurate = l->has_reference ? c.score > d.score : c.mean > d.mean;
        sums->n_accurate += is_accurate;
        if (!m->weights) continue;
        write_weights(l, m, &c, n_pairs, &nll);
        write_weights(l, m, &d, n_pairs, NULL);
    }
    return loss / n_pairs + nll.value;
}

static double weigh_answers(const bl_losses *l, const bl_preference_micro *m,
                            bl_preference_sums *sums)
{
    double n = (double)m->n_documents, loss = 0;

    for (int64_t i = 0; i < m->n_documents; i++) {
        answer a = begin_answer(m, i);
        bool is_desirable = m->marks[a.begin] & BL_MARK_DESIRABLE;
        score(m, 1, &a);
        loss += weigh_unpaired(l, m->kl, is_desirable, &a);
        count(l, &a, is_desirable, sums);
        if (m->weights) write_weights(l, m, &a, n, NULL);
    }
    sums->kl += m->kl;
    return loss / n;
}

void bl_preference_weigh(const bl_losses *l, const bl_preference_micro *m, bl_preference_sums *sums)
{
    double n_rows = (double)(l->is_unpaired ? m->n_documents : m->n_documents / 2);

    if (m->n_documents == 0) return;
    double loss = l->is_unpaired ? weigh_answers(l, m, sums) : weigh_pairs(l, m, sums);
    sums->n_micro += 1;
    sums->n_rows += n_rows;
    sums->loss_by_micro += loss;
    sums->loss_by_row += n_rows * loss;
}

void bl_preference_sum_reference(const bl_losses *l, const bl_preference_micro *m, double *sums)
{
    for (int64_t i = 0; i < m->n_documents; i++) {
        answer a = begin_answer(m, i);
        if (!l->is_unpaired) a.n_shared = bl_min_i64(a.n_shared, begin_answer(m, i ^ 1).n_shared);
        sums[i] = sum_answer(m, m->reference, l->ld_alpha, &a);
    }
}

double bl_preference_divergence(const bl_preference_micro *m)
{
    double sum = 0;

    for (int64_t i = 0; i < m->n_documents; i++) {
        answer a = begin_answer(m, i);
        score(m, 1, &a);
        sum += a.score;
    }
    return sum / (double)m->n_documents;
}
