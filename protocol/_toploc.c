/* TOPLOC's arithmetic: the largest activations of a chunk, and polynomials over GF(65497).

   Gives the very bytes and numbers of protocol/toploc_numpy.py, several times faster; protocol/toploc.py specifies both
   and says in words what is wrong with an input. No threads, no state but a constant table; the interpreter's lock is
   released meanwhile. Any input is safe: shapes, moduli and coefficients are checked here again, and an array that
   another thread writes to gives an error or other numbers, never an access out of bounds. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 /* one binary for CPython 3.11 and all later ones */
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INTERFACE 1 /* raised with every change of a signature, so that a stale binary is not used */

#define FIELD 65497u
#define MIN_MODULUS 32769u
#define MAGNITUDE 0x7FFFu
#define SIGN_AND_EXPONENT 0xFF80u
#define MANTISSA 0x7Fu
#define BLOCK 64          /* values with a common maximum */
#define CANDIDATES 16     /* times k: room for the values that may be among the largest */
#define COUNT_STRIDE 4096 /* below 2^16, so that partial counts have the width of the values */
#define NO_MATCH 18446744073709551616.0

typedef enum { DONE, NO_MODULUS, CHANGED, BAD_MODULUS, BAD_COEFFICIENT, NO_MEMORY } Status;

/* GF(65497) in 16 bits. A product is Montgomery's, a · b / 2^16, so one factor of each is kept times 2^16: "scaled". */

#define FIELD_INVERSE 0x9069u /* FIELD · FIELD_INVERSE = 1 modulo 2^16 */
#define TWO_TO_16 39u         /* modulo FIELD */
#define TWO_TO_32 1521u       /* modulo FIELD: multiplying by it scales */

static uint16_t scaled_inverse[FIELD]; /* 0 for 0, which only equal points ask for */

static void fill_scaled_inverse(void)
{
    scaled_inverse[1] = TWO_TO_16;
    for (uint32_t a = 2; a < FIELD; a++)
        scaled_inverse[a] = (uint16_t)((FIELD - FIELD / a) * scaled_inverse[FIELD % a] % FIELD);
}

static inline uint16_t subtract(uint16_t a, uint16_t b)
{
    uint16_t difference = (uint16_t)(a - b);
    return (uint16_t)(difference + (a < b ? FIELD : 0u));
}

/* For any a, and b below FIELD. */
static inline uint16_t multiply(uint16_t a, uint16_t b)
{
    uint16_t low = (uint16_t)((uint32_t)a * b);
    uint16_t high = (uint16_t)((uint32_t)a * b >> 16);
    uint16_t quotient = (uint16_t)((uint32_t)low * FIELD_INVERSE);
    uint16_t carried = (uint16_t)((uint32_t)quotient * FIELD >> 16);
    return subtract(high, carried);
}

static inline uint16_t reduce(uint16_t a) { return (uint16_t)(a >= FIELD ? a - FIELD : a); }

/* Working memory of one call, in one piece. */

typedef struct {
    size_t values; /* of a chunk */
    uint32_t k;
    size_t capacity;      /* of the candidates */
    uint32_t *candidate;  /* where they lie in the chunk */
    uint32_t *block;      /* that may hold some of them */
    uint32_t *chosen;     /* the k largest, as positions; rising */
    uint16_t *pattern;    /* of the candidates */
    uint16_t *maxima;     /* of the blocks */
    uint16_t *value;      /* patterns of the k largest */
    uint16_t *x, *scaled; /* where the polynomial has its points */
    uint16_t *y, *difference, *coefficient;
    uint64_t *taken; /* a bit per residue */
    void *memory;
} Scratch;

#define TAKEN_WORDS (65536 / 64)

static bool scratch_open(Scratch *s, size_t values, uint32_t k)
{
    size_t blocks = values / BLOCK, capacity = (size_t)k * CANDIDATES;
    size_t wide = capacity + BLOCK + blocks + 1 + k, narrow = capacity + BLOCK + blocks + 6 * (size_t)k;
    uint64_t *memory = malloc(TAKEN_WORDS * sizeof(uint64_t) + wide * sizeof(uint32_t) + narrow * sizeof(uint16_t));
    if (!memory)
        return false;
    *s = (Scratch){.values = values, .k = k, .capacity = capacity, .memory = memory};
    s->taken = memory;
    s->candidate = (uint32_t *)(memory + TAKEN_WORDS);
    s->block = s->candidate + capacity + BLOCK;
    s->chosen = s->block + blocks + 1;
    s->pattern = (uint16_t *)(s->chosen + k);
    s->maxima = s->pattern + capacity + BLOCK;
    s->value = s->maxima + blocks;
    s->x = s->value + k;
    s->scaled = s->x + k;
    s->y = s->scaled + k;
    s->difference = s->y + k;
    s->coefficient = s->difference + k;
    return true;
}

/* The k largest magnitudes of a chunk. */

static size_t count_above(const uint16_t *patterns, size_t count, int16_t threshold)
{
    size_t total = 0;
    for (size_t start = 0; start < count; start += COUNT_STRIDE) {
        size_t stop = count - start < COUNT_STRIDE ? count : start + COUNT_STRIDE;
        uint16_t part = 0;
        for (size_t i = start; i < stop; i++)
            part = (uint16_t)(part + ((int16_t)(patterns[i] & MAGNITUDE) > threshold));
        total += part;
    }
    return total;
}

/* The k-th largest magnitude, bit by bit; count is k at least. */
static int16_t kth_largest(const uint16_t *patterns, size_t count, uint32_t k)
{
    int16_t threshold = 0;
    for (int bit = 14; bit >= 0; bit--) {
        int16_t higher = (int16_t)(threshold | 1 << bit);
        if (count_above(patterns, count, (int16_t)(higher - 1)) >= k)
            threshold = higher;
    }
    return threshold;
}

/* Positions, rising, of the k largest magnitudes, the lowest position first among equals. */
static bool choose(const uint16_t *patterns, size_t count, uint32_t k, uint32_t *chosen)
{
    int16_t threshold = kth_largest(patterns, count, k);
    size_t above = count_above(patterns, count, threshold);
    size_t ties = above < k ? k - above : 0;
    uint32_t found = 0;
    for (size_t i = 0; i < count && found < k; i++) {
        int16_t magnitude = (int16_t)(patterns[i] & MAGNITUDE);
        bool tie = magnitude == threshold && ties > 0;
        ties -= tie;
        chosen[found] = (uint32_t)i;
        found += tie || magnitude > threshold;
    }
    return found == k;
}

static void block_maxima(const uint16_t *chunk, size_t blocks, uint16_t *maxima)
{
    for (size_t block = 0; block < blocks; block++) {
        int16_t most = 0;
        for (size_t i = 0; i < BLOCK; i++) {
            int16_t magnitude = (int16_t)(chunk[block * BLOCK + i] & MAGNITUDE);
            most = magnitude > most ? magnitude : most;
        }
        maxima[block] = (uint16_t)most;
    }
}

static inline size_t collect_each(const uint16_t *chunk, size_t start, size_t stop, int16_t least, Scratch *s,
                                  size_t found)
{
    for (size_t i = start; i < stop; i++) {
        s->candidate[found] = (uint32_t)i;
        s->pattern[found] = chunk[i];
        found += (int16_t)(chunk[i] & MAGNITUDE) >= least;
    }
    return found;
}

/* Four values at a time: adding 2^15 - least sets the top bit of those that are large enough, and few are. */
static size_t collect(const uint16_t *chunk, size_t start, size_t stop, int16_t least, Scratch *s, size_t found)
{
    const uint64_t ones = 0x0001000100010001u, lift = ones * (0x8000u - (uint64_t)least);
    for (; stop - start >= 4; start += 4) {
        uint64_t four;
        memcpy(&four, chunk + start, sizeof four);
        if (((four & ones * MAGNITUDE) + lift) & ones * 0x8000u)
            found = collect_each(chunk, start, start + 4, least, s, found);
    }
    return collect_each(chunk, start, stop, least, s, found);
}

/* Every value that is as large as the k-th largest block maximum, hence all of the k largest. Their number, or SIZE_MAX
   if there is no room for them. */
static size_t collect_candidates(const uint16_t *chunk, Scratch *s)
{
    size_t blocks = s->values / BLOCK, wanted = 0, found = 0;
    block_maxima(chunk, blocks, s->maxima);
    int16_t least = kth_largest(s->maxima, blocks, s->k);
    for (size_t block = 0; block < blocks; block++) { /* apart from the next loop, so that nothing is guessed wrongly */
        s->block[wanted] = (uint32_t)block;
        wanted += (int16_t)s->maxima[block] >= least;
    }
    for (size_t i = 0; i < wanted && found <= s->capacity; i++) {
        size_t start = (size_t)s->block[i] * BLOCK;
        found = collect(chunk, start, start + BLOCK, least, s, found);
    }
    if (found > s->capacity)
        return SIZE_MAX;
    found = collect(chunk, blocks * BLOCK, s->values, least, s, found);
    return found > s->capacity ? SIZE_MAX : found;
}

/* Fills `chosen` and `value`. */
static Status choose_largest(const uint16_t *chunk, Scratch *s)
{
    size_t candidates = SIZE_MAX;
    if (s->values / BLOCK >= 2 * (size_t)s->k)
        candidates = collect_candidates(chunk, s);
    bool direct = candidates == SIZE_MAX;
    if (direct)
        candidates = s->values;
    if (candidates < s->k || !choose(direct ? chunk : s->pattern, candidates, s->k, s->chosen))
        return CHANGED;
    for (uint32_t j = 0; j < s->k; j++) {
        if (!direct)
            s->chosen[j] = s->candidate[s->chosen[j]];
        s->value[j] = chunk[s->chosen[j]];
    }
    return DONE;
}

/* Points. */

static bool separates(const uint32_t *index, uint32_t k, uint32_t modulus, uint64_t *taken)
{
    for (size_t word = 0; word < TAKEN_WORDS; word++)
        taken[word] = 0;
    for (uint32_t j = 0; j < k; j++) {
        uint32_t residue = index[j] % modulus;
        uint64_t bit = (uint64_t)1 << residue % 64;
        if (taken[residue / 64] & bit)
            return false;
        taken[residue / 64] |= bit;
    }
    return true;
}

/* The largest modulus that keeps the indices apart, or 0. */
static uint32_t find_modulus(const uint32_t *index, uint32_t k, uint64_t *taken)
{
    uint32_t most = 0;
    for (uint32_t j = 0; j < k; j++)
        most = index[j] > most ? index[j] : most;
    for (uint32_t modulus = FIELD; modulus >= MIN_MODULUS; modulus--)
        if (most < modulus || separates(index, k, modulus, taken))
            return modulus;
    return 0;
}

static void place_points(Scratch *s, uint32_t modulus)
{
    for (uint32_t j = 0; j < s->k; j++)
        s->x[j] = (uint16_t)(s->chosen[j] % modulus);
    for (uint32_t j = 0; j < s->k; j++)
        s->scaled[j] = multiply(s->x[j], TWO_TO_32);
}

/* Polynomials. The loops write what they have read already, one element behind, so that they run in vectors. */

/* Leaves in y[j] the divided difference over the points j … k - 1. */
static void divide_differences(Scratch *s)
{
    const uint16_t *x = s->x;
    uint16_t *restrict y = s->y, *restrict inverse = s->difference;
    for (uint32_t order = 1; order < s->k; order++) {
        uint32_t count = s->k - order;
        for (uint32_t j = 0; j < count; j++)
            inverse[j] = subtract(x[j + order], x[j]);
        for (uint32_t j = 0; j < count; j++)
            inverse[j] = scaled_inverse[inverse[j]];
        for (uint32_t j = 0; j < count; j++)
            y[j] = multiply(subtract(y[j + 1], y[j]), inverse[j]);
    }
}

/* Newton's form over the points in reverse, then Horner's scheme. */
static void interpolate(Scratch *s)
{
    uint32_t k = s->k;
    uint16_t *c = s->coefficient;
    divide_differences(s);
    for (uint32_t j = 0; j < k; j++)
        c[j] = s->y[k - 1 - j];
    for (uint32_t node = k - 1; node-- > 0;) {
        uint16_t point = s->scaled[k - 1 - node];
        for (uint32_t j = node; j < k - 1; j++)
            c[j] = subtract(c[j], multiply(c[j + 1], point));
    }
}

/* Leaves in y the values of the polynomial at the points. */
static void evaluate(Scratch *s)
{
    uint16_t *restrict y = s->y;
    const uint16_t *restrict scaled = s->scaled;
    for (uint32_t j = 0; j < s->k; j++)
        y[j] = 0;
    for (uint32_t degree = s->k; degree-- > 0;) {
        uint16_t negated = subtract(0, s->coefficient[degree]);
        for (uint32_t j = 0; j < s->k; j++)
            y[j] = subtract(multiply(y[j], scaled[j]), negated);
    }
}

/* One chunk. */

static void put_word(unsigned char *proof, size_t word, uint16_t value)
{
    proof[2 * word] = (unsigned char)(value >> 8);
    proof[2 * word + 1] = (unsigned char)value;
}

static uint16_t get_word(const unsigned char *proof, size_t word)
{
    return (uint16_t)(proof[2 * word] << 8 | proof[2 * word + 1]);
}

/* From `chosen` and `value`. */
static Status encode_chunk(Scratch *s, unsigned char *proof)
{
    uint32_t modulus = find_modulus(s->chosen, s->k, s->taken);
    if (!modulus)
        return NO_MODULUS;
    place_points(s, modulus);
    for (uint32_t j = 0; j < s->k; j++)
        s->y[j] = reduce(s->value[j]);
    interpolate(s);
    put_word(proof, 0, (uint16_t)modulus);
    for (uint32_t j = 0; j < s->k; j++)
        put_word(proof, 1 + j, s->coefficient[j]);
    return DONE;
}

static Status decode_chunk(const unsigned char *proof, Scratch *s, uint32_t *modulus)
{
    *modulus = get_word(proof, 0);
    if (*modulus < MIN_MODULUS || *modulus > FIELD)
        return BAD_MODULUS;
    for (uint32_t j = 0; j < s->k; j++) {
        s->coefficient[j] = get_word(proof, 1 + j);
        if (s->coefficient[j] >= FIELD)
            return BAD_COEFFICIENT;
    }
    return DONE;
}

typedef struct {
    uint32_t mismatches;
    double mean, median;
} Result;

static Result compare(const uint16_t *own, const uint16_t *claimed, uint32_t k)
{
    uint32_t errors[MANTISSA + 1] = {0}, matches = 0, below = 0, median = 0;
    uint64_t sum = 0;
    for (uint32_t j = 0; j < k; j++) {
        uint16_t value = reduce(own[j]);
        int error = (int)(value & MANTISSA) - (int)(claimed[j] & MANTISSA);
        bool match = !((value ^ claimed[j]) & SIGN_AND_EXPONENT);
        errors[error < 0 ? -error : error] += match;
        matches += match;
    }
    if (!matches)
        return (Result){k, NO_MATCH, NO_MATCH};
    for (uint32_t error = 0; error <= MANTISSA; error++)
        sum += (uint64_t)error * errors[error];
    while ((below += errors[median]) <= matches / 2)
        median++;
    return (Result){k - matches, (double)sum / (double)matches, (double)median};
}

static Status build_chunk(const uint16_t *chunk, Scratch *s, unsigned char *proof)
{
    Status status = choose_largest(chunk, s);
    return status == DONE ? encode_chunk(s, proof) : status;
}

static Status verify_chunk(const uint16_t *chunk, const unsigned char *proof, Scratch *s, Result *result)
{
    uint32_t modulus;
    Status status = decode_chunk(proof, s, &modulus);
    if (status == DONE)
        status = choose_largest(chunk, s);
    if (status != DONE)
        return status;
    place_points(s, modulus);
    evaluate(s);
    *result = compare(s->value, s->y, s->k);
    return DONE;
}

/* Python. */

static PyObject *raise_status(Status status)
{
    static const char *const reasons[] = {
        [NO_MODULUS] = "no modulus separates the points of a chunk",
        [CHANGED] = "the hidden states changed while they were read",
        [BAD_MODULUS] = "a proof has an impossible modulus",
        [BAD_COEFFICIENT] = "a proof has a coefficient outside the field",
    };
    if (status == NO_MEMORY)
        return PyErr_NoMemory();
    PyErr_SetString(status == NO_MODULUS ? PyExc_OverflowError : PyExc_ValueError, reasons[status]);
    return NULL;
}

/* A C-contiguous array [rows, columns] of numbers of so many bytes; both at least 1, and columns below 2^32. */
static bool open_array(PyObject *object, Py_buffer *view, Py_ssize_t item_bytes)
{
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS) < 0)
        return false;
    if (view->ndim == 2 && view->itemsize == item_bytes && view->shape[0] > 0 && view->shape[1] > 0 &&
        (uint64_t)view->shape[1] <= UINT32_MAX && (uintptr_t)view->buf % (size_t)item_bytes == 0)
        return true;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "not a filled two-dimensional array of the right type");
    return false;
}

static bool check_top_k(Py_ssize_t top_k, Py_ssize_t values)
{
    if (top_k >= 1 && top_k <= values && top_k <= (Py_ssize_t)FIELD)
        return true;
    PyErr_SetString(PyExc_ValueError, "top_k must be at least 1, and at most the values of a chunk and the field");
    return false;
}

static Py_ssize_t proof_bytes(Py_ssize_t top_k) { return 2 + 2 * top_k; }

static Status build_all(const Py_buffer *view, uint32_t k, unsigned char *proofs)
{
    Scratch s;
    Status status = scratch_open(&s, (size_t)view->shape[1], k) ? DONE : NO_MEMORY;
    if (status != DONE)
        return status;
    for (Py_ssize_t chunk = 0; status == DONE && chunk < view->shape[0]; chunk++)
        status = build_chunk((const uint16_t *)view->buf + chunk * view->shape[1], &s, proofs + chunk * proof_bytes(k));
    free(s.memory);
    return status;
}

static PyObject *build(PyObject *module, PyObject *args)
{
    PyObject *patterns, *proofs = NULL;
    Py_ssize_t top_k;
    Py_buffer view;
    (void)module;
    if (!PyArg_ParseTuple(args, "On", &patterns, &top_k) || !open_array(patterns, &view, 2))
        return NULL;
    if (check_top_k(top_k, view.shape[1]) && view.shape[0] <= PY_SSIZE_T_MAX / proof_bytes(top_k))
        proofs = PyBytes_FromStringAndSize(NULL, view.shape[0] * proof_bytes(top_k));
    if (proofs) {
        Status status;
        unsigned char *bytes = (unsigned char *)PyBytes_AsString(proofs);
        Py_BEGIN_ALLOW_THREADS
        status = build_all(&view, (uint32_t)top_k, bytes);
        Py_END_ALLOW_THREADS
        if (status != DONE) {
            Py_CLEAR(proofs);
            raise_status(status);
        }
    }
    PyBuffer_Release(&view);
    return proofs;
}

static Status verify_all(const Py_buffer *view, uint32_t k, const unsigned char *proofs, Result *results)
{
    Scratch s;
    Status status = scratch_open(&s, (size_t)view->shape[1], k) ? DONE : NO_MEMORY;
    if (status != DONE)
        return status;
    for (Py_ssize_t chunk = 0; status == DONE && chunk < view->shape[0]; chunk++)
        status = verify_chunk((const uint16_t *)view->buf + chunk * view->shape[1], proofs + chunk * proof_bytes(k), &s,
                                results + chunk);
    free(s.memory);
    return status;
}

static PyObject *result_list(const Result *results, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *row = Py_BuildValue("(Idd)", results[i].mismatches, results[i].mean, results[i].median);
        if (!row || PyList_SetItem(list, i, row) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *verify_proofs(const Py_buffer *view, uint32_t k, const unsigned char *proofs)
{
    Status status;
    PyObject *list = NULL;
    Result *results = calloc((size_t)view->shape[0], sizeof(Result));
    if (!results)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    status = verify_all(view, k, proofs, results);
    Py_END_ALLOW_THREADS
    list = status == DONE ? result_list(results, view->shape[0]) : raise_status(status);
    free(results);
    return list;
}

static PyObject *verify(PyObject *module, PyObject *args)
{
    PyObject *patterns, *bytes, *results = NULL;
    Py_ssize_t top_k, size;
    char *proofs;
    Py_buffer view;
    (void)module;
    if (!PyArg_ParseTuple(args, "OSn", &patterns, &bytes, &top_k) ||
        PyBytes_AsStringAndSize(bytes, &proofs, &size) < 0 || !open_array(patterns, &view, 2))
        return NULL;
    if (!check_top_k(top_k, view.shape[1]))
        ;
    else if (size % proof_bytes(top_k) || size / proof_bytes(top_k) != view.shape[0])
        PyErr_SetString(PyExc_ValueError, "there must be as many whole proofs as chunks");
    else
        results = verify_proofs(&view, (uint32_t)top_k, (const unsigned char *)proofs);
    PyBuffer_Release(&view);
    return results;
}

static Status encode_points(const Py_buffer *indices, const Py_buffer *values, unsigned char *proof)
{
    Scratch s;
    uint32_t k = (uint32_t)indices->shape[1];
    Status status = scratch_open(&s, k, k) ? DONE : NO_MEMORY;
    if (status != DONE)
        return status;
    for (uint32_t j = 0; j < k; j++) {
        s.chosen[j] = ((const uint32_t *)indices->buf)[j];
        s.value[j] = ((const uint16_t *)values->buf)[j];
    }
    status = encode_chunk(&s, proof);
    free(s.memory);
    return status;
}

static PyObject *encode_views(const Py_buffer *indices, const Py_buffer *values)
{
    PyObject *proof = NULL;
    if (indices->shape[0] != 1 || values->shape[0] != 1 || indices->shape[1] != values->shape[1])
        PyErr_SetString(PyExc_ValueError, "one row of indices and as many values");
    else if (check_top_k(indices->shape[1], indices->shape[1]))
        proof = PyBytes_FromStringAndSize(NULL, proof_bytes(indices->shape[1]));
    if (proof) {
        Status status = encode_points(indices, values, (unsigned char *)PyBytes_AsString(proof));
        if (status != DONE) {
            Py_CLEAR(proof);
            raise_status(status);
        }
    }
    return proof;
}

static PyObject *encode(PyObject *module, PyObject *args)
{
    PyObject *indices, *values, *proof = NULL;
    Py_buffer index_view, value_view;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &indices, &values) || !open_array(indices, &index_view, 4))
        return NULL;
    if (open_array(values, &value_view, 2)) {
        proof = encode_views(&index_view, &value_view);
        PyBuffer_Release(&value_view);
    }
    PyBuffer_Release(&index_view);
    return proof;
}

static PyMethodDef methods[] = {
    {"build", build, METH_VARARGS, "build(patterns: uint16[chunks, values], top_k) -> proofs, one after another"},
    {"verify", verify, METH_VARARGS, "verify(patterns, proofs, top_k) -> [(mismatches, mean, median)]"},
    {"encode", encode, METH_VARARGS, "encode(indices: uint32[1, k], values: uint16[1, k]) -> proof"},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module)
{
    fill_scaled_inverse();
    return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)start}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_toploc",
    .m_doc = "TOPLOC's arithmetic; see protocol.toploc.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__toploc(void);

PyMODINIT_FUNC PyInit__toploc(void) { return PyModuleDef_Init(&definition); }
