/* Calls a gRPC method, or posts over plain HTTP/2, and checks every answer; prints what it measured as JSON.
 *
 * HTTP/2 with prior knowledge, without TLS (RFC 9113, section 3.3), framed as gRPC over HTTP/2 says. A closed loop has so
 * many callers, each of which makes its next call when the last was answered. An open loop makes calls at a fixed rate,
 * whatever the answers take: a call's latency counts from when it was due, also where it had to wait for a free caller.
 *
 * Each call has a key, 36 characters that look like a UUIDv4, made from a seed and the call's number: so the same keys can
 * be sent again: with --keys those of so many numbers from --first on. It stands wherever the path, a header or the request has the placeholder. With --list the keys of --calls
 * calls from --first on are printed, and nothing is called.
 *
 * Exit code: 0; 1 where an answer was wrong; 2 where it could not run.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <nghttp2/nghttp2.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define PLACEHOLDER "00000000-0000-4000-8000-000000000000"
#define KEY_LENGTH (sizeof PLACEHOLDER - 1)
#define PLACES_MAX 8
#define HEADERS_MAX 16
#define CONNECTIONS_MAX 256
#define GRPC_PREFIX 5
#define CANNOT_RUN 2
/* How long answers may take once no more calls are made, and anything may take before. */
#define LAST_ANSWERS_NS (30 * 1000000000ull)
/* Latencies are kept in units of 100 ns: 32 bits hold 7 minutes. */
#define UNIT_NS 100
#define STRIDE 2654435761ull
#define WINDOW (16 * 1024 * 1024)

enum { STATUS_SUCCEEDED = 2 };
enum outcome { OK, BAD_HTTP, BAD_GRPC, BAD_MESSAGE, BAD_STATUS, BAD_REPLAYED, BAD_KEY, BAD_STREAM, NO_ANSWER, OUTCOMES };
static const char *const OUTCOME_NAMES[OUTCOMES] = {
    "ok", "http_status", "grpc_status", "message", "status", "replayed", "key", "stream", "no_answer"};

/* Text or bytes with places for the key. */
struct template {
    char *bytes;
    size_t length, places, at[PLACES_MAX];
};

static struct {
    const char *address;
    struct template path, request, header_names[HEADERS_MAX], header_values[HEADERS_MAX];
    size_t headers;
    bool plain, balance, replayed, list;
    uint64_t seed, first, keys, skip, calls;
    unsigned callers, connections;
    double rate, seconds;
} options = {.callers = 1, .connections = 1};

struct connection {
    int fd;
    uint16_t port;
    nghttp2_session *session;
    bool is_settled, waits_to_write;
    const uint8_t *unsent;
    size_t unsent_length;
};

struct call {
    struct connection *connection;
    uint64_t due;
    char key[KEY_LENGTH + 1];
    char *request;
    size_t sent;
    uint8_t *response;
    size_t response_length, response_capacity;
    int http_status, grpc_status;
    struct call *next_free;
};

static struct connection connections[CONNECTIONS_MAX];
static struct call *calls;
static struct call *first_free, *last_free;
static unsigned in_flight;
static uint64_t made, answered, outcomes[OUTCOMES], began, ended, latest_start;
static uint32_t *latencies;
static size_t latencies_capacity;
static char first_error[256];
static int poller;

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000ull + (uint64_t)time.tv_nsec;
}

static void *allocated(void *memory) {
    if (memory == NULL) errx(CANNOT_RUN, "out of memory");
    return memory;
}

/* splitmix64 (Steele, Lea and Flood, 2014): neighbours become unlike. */
static uint64_t mixed(uint64_t number) {
    number += 0x9e3779b97f4a7c15ull;
    number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9ull;
    number = (number ^ number >> 27) * 0x94d049bb133111ebull;
    return number ^ number >> 31;
}

static void make_key(uint64_t number, char key[KEY_LENGTH + 1]) {
    uint64_t high = mixed(mixed(options.seed) ^ number), low = mixed(high ^ number);
    snprintf(key, KEY_LENGTH + 1, "%08" PRIx64 "-%04" PRIx64 "-4%03" PRIx64 "-%04" PRIx64 "-%012" PRIx64, high >> 32,
             high >> 16 & 0xffff, high & 0xfff, (low >> 48 & 0x3fff) | 0x8000, low & (UINT64_MAX >> 16));
}

static struct template template_of(const char *bytes, size_t length) {
    struct template template = {.bytes = allocated(malloc(length + 1)), .length = length};
    memcpy(template.bytes, bytes, length);
    template.bytes[length] = 0;
    const char *from = template.bytes, *found;
    while ((found = memmem(from, template.bytes + length - from, PLACEHOLDER, KEY_LENGTH)) != NULL) {
        if (template.places == PLACES_MAX) errx(CANNOT_RUN, "more than %d places for the key", PLACES_MAX);
        template.at[template.places++] = found - template.bytes;
        from = found + KEY_LENGTH;
    }
    return template;
}

static void fill(const struct template *template, char *bytes, const char *key) {
    for (size_t i = 0; i < template->places; i++) memcpy(bytes + template->at[i], key, KEY_LENGTH);
}

/* Reads a protobuf field, a varint or bytes; for a varint `bytes` is NULL. Gives false where it is neither. */
struct field {
    uint64_t number, value;
    const uint8_t *bytes;
};

static bool read_varint(const uint8_t **at, const uint8_t *end, uint64_t *value) {
    *value = 0;
    for (int shift = 0; shift < 64 && *at < end; shift += 7) {
        uint8_t byte = *(*at)++;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) return true;
    }
    return false;
}

static bool read_field(const uint8_t **at, const uint8_t *end, struct field *field) {
    uint64_t tag;
    if (!read_varint(at, end, &tag)) return false;
    field->number = tag >> 3;
    field->bytes = NULL;
    if ((tag & 7) == 0) return read_varint(at, end, &field->value);
    if ((tag & 7) != 2 || !read_varint(at, end, &field->value) || field->value > (uint64_t)(end - *at)) return false;
    field->bytes = *at;
    *at += field->value;
    return true;
}

/* Judges a decideonce.v1.DecideResponse: decided, first or again as expected, and for the key that was sent. */
static enum outcome judge_decision(const uint8_t *at, const uint8_t *end, const char *key) {
    uint64_t status = 0, replayed = 0;
    bool is_ours = false;
    struct field field;
    while (at < end) {
        if (!read_field(&at, end, &field)) return BAD_MESSAGE;
        if (field.number == 1 && field.bytes == NULL) status = field.value;
        if (field.number == 2 && field.bytes == NULL) replayed = field.value;
        if (field.number != 4 || field.bytes == NULL) continue;
        const uint8_t *inner = field.bytes, *inner_end = inner + field.value;
        while (inner < inner_end) {
            if (!read_field(&inner, inner_end, &field)) return BAD_MESSAGE;
            if (field.number == 4 && field.bytes != NULL)
                is_ours = field.value == KEY_LENGTH && memcmp(field.bytes, key, KEY_LENGTH) == 0;
        }
    }
    if (status != STATUS_SUCCEEDED) return BAD_STATUS;
    if (!is_ours) return BAD_KEY;
    return (replayed != 0) == options.replayed ? OK : BAD_REPLAYED;
}

static enum outcome judge(const struct call *call, uint32_t stream_error) {
    if (stream_error != NGHTTP2_NO_ERROR) return BAD_STREAM;
    if (call->http_status != 200) return BAD_HTTP;
    const uint8_t *response = call->response;
    size_t length = call->response_length;
    if (options.plain) return memmem(response, length, call->key, KEY_LENGTH) != NULL ? OK : BAD_KEY;
    if (call->grpc_status != 0) return BAD_GRPC;
    if (length < GRPC_PREFIX || response[0] != 0) return BAD_MESSAGE;
    uint32_t announced;
    memcpy(&announced, response + 1, sizeof announced);
    if (ntohl(announced) != length - GRPC_PREFIX) return BAD_MESSAGE;
    return judge_decision(response + GRPC_PREFIX, response + length, call->key);
}

static void note_error(const char *text, size_t length) {
    if (first_error[0] != 0) return;
    for (size_t i = 0; i < length && i < sizeof first_error - 1; i++)
        first_error[i] = text[i] < ' ' || text[i] > '~' || text[i] == '"' || text[i] == '\\' ? '.' : text[i];
}

static void record(const struct call *call, enum outcome outcome, uint64_t at) {
    outcomes[outcome]++;
    if (outcome != OK && first_error[0] == 0) note_error(OUTCOME_NAMES[outcome], strlen(OUTCOME_NAMES[outcome]));
    if (answered == latencies_capacity) {
        latencies_capacity = latencies_capacity ? 2 * latencies_capacity : 1 << 20;
        latencies = allocated(realloc(latencies, latencies_capacity * sizeof *latencies));
    }
    uint64_t units = (at - call->due) / UNIT_NS;
    latencies[answered++] = units > UINT32_MAX ? UINT32_MAX : units;
    ended = at;
}

static ssize_t give_request(nghttp2_session *session, int32_t stream, uint8_t *buffer, size_t length, uint32_t *flags,
                            nghttp2_data_source *source, void *user_data) {
    (void)session, (void)stream, (void)user_data;
    struct call *call = source->ptr;
    size_t left = options.request.length - call->sent, given = left < length ? left : length;
    memcpy(buffer, call->request + call->sent, given);
    call->sent += given;
    if (call->sent == options.request.length) *flags |= NGHTTP2_DATA_FLAG_EOF;
    return given;
}

static nghttp2_nv header(const char *name, const char *value, size_t value_length) {
    return (nghttp2_nv){(uint8_t *)name, (uint8_t *)value, strlen(name), value_length, NGHTTP2_NV_FLAG_NONE};
}

static void start_call(struct call *call, uint64_t due) {
    /* A prime as the stride: each key once before any again, and neighbours in time far apart. */
    uint64_t number = options.first + (options.keys ? (options.skip + made) * STRIDE % options.keys : made);
    made++;
    in_flight++;
    call->due = due;
    call->sent = call->response_length = 0;
    call->http_status = call->grpc_status = -1;
    make_key(number, call->key);
    fill(&options.request, call->request, call->key);
    fill(&options.path, options.path.bytes, call->key);
    nghttp2_nv headers[HEADERS_MAX + 4] = {
        header(":method", "POST", 4),
        header(":scheme", "http", 4),
        header(":authority", options.address, strlen(options.address)),
        header(":path", options.path.bytes, options.path.length),
    };
    for (size_t i = 0; i < options.headers; i++) {
        struct template *value = &options.header_values[i];
        fill(value, value->bytes, call->key);
        headers[4 + i] = header(options.header_names[i].bytes, value->bytes, value->length);
    }
    nghttp2_data_provider provider = {{.ptr = call}, give_request};
    if (nghttp2_submit_request(call->connection->session, NULL, headers, 4 + options.headers, &provider, call) < 0)
        errx(CANNOT_RUN, "a call could not be sent");
}

static bool may_start(uint64_t at) {
    return (options.calls == 0 || made < options.calls) &&
           (options.seconds == 0 || at < began + (uint64_t)(options.seconds * 1e9));
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name, size_t name_length,
                     const uint8_t *value, size_t value_length, uint8_t flags, void *user_data) {
    (void)flags, (void)user_data;
    struct call *call = nghttp2_session_get_stream_user_data(session, frame->hd.stream_id);
    if (call == NULL) return 0;
    /* nghttp2 ends what it gives with a zero. */
    if (name_length == 7 && memcmp(name, ":status", 7) == 0) call->http_status = atoi((const char *)value);
    if (name_length == 11 && memcmp(name, "grpc-status", 11) == 0) call->grpc_status = atoi((const char *)value);
    if (name_length == 12 && memcmp(name, "grpc-message", 12) == 0) note_error((const char *)value, value_length);
    return 0;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t stream, const uint8_t *data, size_t length,
                   void *user_data) {
    (void)flags, (void)user_data;
    struct call *call = nghttp2_session_get_stream_user_data(session, stream);
    if (call == NULL) return 0;
    if (call->response_length + length > call->response_capacity) {
        call->response_capacity = 2 * (call->response_length + length);
        call->response = allocated(realloc(call->response, call->response_capacity));
    }
    memcpy(call->response + call->response_length, data, length);
    call->response_length += length;
    return 0;
}

static int on_stream_close(nghttp2_session *session, int32_t stream, uint32_t error_code, void *user_data) {
    (void)user_data;
    struct call *call = nghttp2_session_get_stream_user_data(session, stream);
    if (call == NULL) return 0;
    uint64_t at = now();
    record(call, judge(call, error_code), at);
    in_flight--;
    if (options.rate == 0 && may_start(at)) {
        start_call(call, at);
        return 0;
    }
    /* The one that has been free for longest is next, so that connections take turns. */
    call->next_free = NULL;
    if (first_free == NULL) first_free = call;
    else last_free->next_free = call;
    last_free = call;
    return 0;
}

static int on_frame(nghttp2_session *session, const nghttp2_frame *frame, void *user_data) {
    (void)session;
    struct connection *connection = user_data;
    if (frame->hd.type == NGHTTP2_SETTINGS && !(frame->hd.flags & NGHTTP2_FLAG_ACK)) connection->is_settled = true;
    if (frame->hd.type == NGHTTP2_GOAWAY) errx(CANNOT_RUN, "the server closes the connection");
    return 0;
}

static void watch(struct connection *connection, bool to_write, int operation) {
    struct epoll_event event = {.events = EPOLLIN | (to_write ? EPOLLOUT : 0), .data.ptr = connection};
    if (epoll_ctl(poller, operation, connection->fd, &event) < 0) err(CANNOT_RUN, "epoll_ctl");
    connection->waits_to_write = to_write;
}

static void send_what_is_due(struct connection *connection) {
    for (;;) {
        if (connection->unsent_length == 0) {
            ssize_t length = nghttp2_session_mem_send(connection->session, &connection->unsent);
            if (length < 0) errx(CANNOT_RUN, "%s", nghttp2_strerror(length));
            if (length == 0) break;
            connection->unsent_length = length;
        }
        ssize_t written = write(connection->fd, connection->unsent, connection->unsent_length);
        if (written < 0 && errno == EAGAIN) {
            if (!connection->waits_to_write) watch(connection, true, EPOLL_CTL_MOD);
            return;
        }
        if (written < 0) err(CANNOT_RUN, "write");
        connection->unsent += written;
        connection->unsent_length -= written;
    }
    if (connection->waits_to_write) watch(connection, false, EPOLL_CTL_MOD);
}

static void take_what_came(struct connection *connection) {
    static uint8_t buffer[256 * 1024];
    ssize_t length = read(connection->fd, buffer, sizeof buffer);
    if (length == 0) errx(CANNOT_RUN, "the server closed a connection");
    if (length < 0) {
        if (errno == EAGAIN) return;
        err(CANNOT_RUN, "read");
    }
    ssize_t taken = nghttp2_session_mem_recv(connection->session, buffer, length);
    if (taken < 0) errx(CANNOT_RUN, "%s", nghttp2_strerror(taken));
}

static void open_connection(struct connection *connection, const struct sockaddr_in *server) {
    connection->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connection->fd < 0 || connect(connection->fd, (const struct sockaddr *)server, sizeof *server) < 0)
        err(CANNOT_RUN, "connect to %s", options.address);
    int on = 1;
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(connection->fd, F_SETFL, O_NONBLOCK);
    struct sockaddr_in own;
    socklen_t length = sizeof own;
    getsockname(connection->fd, (struct sockaddr *)&own, &length);
    connection->port = ntohs(own.sin_port);

    nghttp2_session_callbacks *callbacks;
    nghttp2_session_callbacks_new(&callbacks);
    nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_stream_close);
    nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, on_frame);
    if (nghttp2_session_client_new(&connection->session, callbacks, connection) != 0) allocated(NULL);
    nghttp2_session_callbacks_del(callbacks);
    nghttp2_settings_entry settings[] = {{NGHTTP2_SETTINGS_ENABLE_PUSH, 0},
                                         {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, WINDOW}};
    nghttp2_submit_settings(connection->session, NGHTTP2_FLAG_NONE, settings, 2);
    nghttp2_session_set_local_window_size(connection->session, NGHTTP2_FLAG_NONE, 0, WINDOW);
    watch(connection, false, EPOLL_CTL_ADD);
    send_what_is_due(connection);
}

/* Waits for what comes, until a moment, and answers it. */
static void turn(uint64_t until, uint64_t at) {
    struct epoll_event events[CONNECTIONS_MAX];
    uint64_t wait = until > at ? until - at : 0;
    struct timespec limit = {wait / 1000000000ull, wait % 1000000000ull};
    int count = epoll_pwait2(poller, events, CONNECTIONS_MAX, &limit, NULL);
    if (count < 0 && errno != EINTR) err(CANNOT_RUN, "epoll_pwait2");
    for (int i = 0; i < count; i++)
        if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) take_what_came(events[i].data.ptr);
    for (unsigned i = 0; i < options.connections; i++) send_what_is_due(&connections[i]);
}

static void open_connections(void) {
    char host[64];
    unsigned port;
    struct sockaddr_in server = {.sin_family = AF_INET};
    if (sscanf(options.address, "%63[0-9.]:%u", host, &port) != 2 || inet_pton(AF_INET, host, &server.sin_addr) != 1)
        errx(CANNOT_RUN, "--address must be an IPv4 address and a port, and is %s", options.address);
    server.sin_port = htons(port);
    for (unsigned i = 0; i < options.connections; i++) open_connection(&connections[i], &server);
    uint64_t limit = now() + LAST_ANSWERS_NS;
    for (unsigned settled = 0; settled < options.connections;) {
        if (now() > limit) errx(CANNOT_RUN, "the server doesn't speak HTTP/2");
        turn(limit, now());
        settled = 0;
        for (unsigned i = 0; i < options.connections; i++) settled += connections[i].is_settled;
    }
}

/* Tells its own ports, and keeps the connections from those that it is then told to keep. */
static void balance_connections(void) {
    for (unsigned i = 0; i < options.connections; i++) printf("%s%u", i ? " " : "", connections[i].port);
    printf("\n");
    fflush(stdout);
    bool keeps[UINT16_MAX + 1] = {false};
    char line[8 * CONNECTIONS_MAX], *at = line, *end;
    if (fgets(line, sizeof line, stdin) == NULL) errx(CANNOT_RUN, "told no ports to keep");
    for (unsigned long port; port = strtoul(at, &end, 10), end != at; at = end) keeps[port & UINT16_MAX] = true;
    unsigned kept = 0;
    for (unsigned i = 0; i < options.connections; i++) {
        epoll_ctl(poller, EPOLL_CTL_DEL, connections[i].fd, NULL);
        if (keeps[connections[i].port]) {
            /* The session was told where its connection is; that moves. */
            nghttp2_session_set_user_data(connections[i].session, &connections[kept]);
            connections[kept] = connections[i];
            watch(&connections[kept], false, EPOLL_CTL_ADD);
            kept++;
        } else {
            close(connections[i].fd);
            nghttp2_session_del(connections[i].session);
        }
    }
    if (kept == 0) errx(CANNOT_RUN, "told to keep no port of its own");
    options.connections = kept;
}

static void make_callers(void) {
    calls = allocated(calloc(options.callers, sizeof *calls));
    for (unsigned i = 0; i < options.callers; i++) {
        struct call *call = &calls[i];
        call->connection = &connections[i % options.connections];
        call->request = allocated(malloc(options.request.length + 1));
        memcpy(call->request, options.request.bytes, options.request.length);
        call->next_free = i + 1 < options.callers ? &calls[i + 1] : NULL;
    }
    first_free = &calls[0];
    last_free = &calls[options.callers - 1];
}

/* Starts every call that is due and for which a caller is free; gives when the next is due. */
static uint64_t start_due_calls(uint64_t at) {
    for (;;) {
        uint64_t due = options.rate == 0 ? at : began + (uint64_t)(made * (1e9 / options.rate));
        if (!may_start(due)) return UINT64_MAX;
        if (due > at) return due;
        if (first_free == NULL) return at + LAST_ANSWERS_NS;
        struct call *call = first_free;
        first_free = call->next_free;
        if (at - due > latest_start) latest_start = at - due;
        start_call(call, due);
    }
}

static void run(void) {
    began = ended = now();
    uint64_t last_progress = began, answered_before = 0;
    for (;;) {
        uint64_t at = now(), next = start_due_calls(at);
        if (next == UINT64_MAX && in_flight == 0) return;
        if (answered != answered_before || in_flight == 0) last_progress = at;
        answered_before = answered;
        if (at > last_progress + LAST_ANSWERS_NS) {
            for (unsigned i = 0; i < options.callers && in_flight; i++, in_flight--) record(&calls[i], NO_ANSWER, at);
            return;
        }
        for (unsigned i = 0; i < options.connections; i++) send_what_is_due(&connections[i]);
        uint64_t patience = last_progress + LAST_ANSWERS_NS + 1;
        turn(next < patience ? next : patience, at);
    }
}

static int ascending(const void *one, const void *other) {
    uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;
    return (a > b) - (a < b);
}

static double percentile_ms(double share) {
    if (answered == 0) return 0;
    uint64_t rank = (uint64_t)(share * answered + 0.999999);
    return latencies[rank ? rank - 1 : 0] * (UNIT_NS / 1e6);
}

static int report(void) {
    qsort(latencies, answered, sizeof *latencies, ascending);
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    double cpu = use.ru_utime.tv_sec + use.ru_stime.tv_sec + (use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
    double seconds = (ended - began) / 1e9;
    uint64_t errors = answered - outcomes[OK];
    printf("{\"calls\": %" PRIu64 ", \"errors\": %" PRIu64 ", \"seconds\": %.6f, \"per_second\": %.3f, ", answered, errors,
           seconds, seconds > 0 ? answered / seconds : 0);
    printf("\"p50_ms\": %.4f, \"p95_ms\": %.4f, \"p99_ms\": %.4f, \"max_ms\": %.4f, ", percentile_ms(0.5),
           percentile_ms(0.95), percentile_ms(0.99), percentile_ms(1));
    printf("\"latest_start_ms\": %.4f, \"cpu_seconds\": %.6f, \"connections\": %u, \"error_kinds\": {", latest_start / 1e6,
           cpu, options.connections);
    const char *separator = "";
    for (int i = OK + 1; i < OUTCOMES; i++) {
        if (outcomes[i] == 0) continue;
        printf("%s\"%s\": %" PRIu64, separator, OUTCOME_NAMES[i], outcomes[i]);
        separator = ", ";
    }
    printf("}, \"first_error\": \"%s\"}\n", errors ? first_error : "");
    return errors > 0 || answered == 0;
}

static struct template request_of(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) err(CANNOT_RUN, "%s", path);
    static char bytes[64 * 1024];
    size_t prefix = options.plain ? 0 : GRPC_PREFIX;
    size_t length = fread(bytes + prefix, 1, sizeof bytes - prefix, file);
    if (length == 0 || !feof(file)) errx(CANNOT_RUN, "%s is empty or too long", path);
    fclose(file);
    uint32_t announced = htonl(length);
    if (prefix) memcpy(bytes + 1, &announced, sizeof announced);
    return template_of(bytes, prefix + length);
}

static void add_header(const char *text) {
    const char *colon = strchr(text, ':');
    if (colon == NULL || options.headers == HEADERS_MAX) errx(CANNOT_RUN, "--header must be NAME:VALUE, at most %d", HEADERS_MAX);
    options.header_names[options.headers] = template_of(text, colon - text);
    options.header_values[options.headers++] = template_of(colon + 1, strlen(colon + 1));
}

static void read_options(int count, char **arguments) {
    static const struct option known[] = {
        {"address", required_argument, NULL, 'a'},  {"path", required_argument, NULL, 'p'},
        {"header", required_argument, NULL, 'h'},   {"request", required_argument, NULL, 'q'},
        {"plain", no_argument, NULL, 'P'},          {"balance", no_argument, NULL, 'b'},
        {"replayed", no_argument, NULL, 'R'},       {"seed", required_argument, NULL, 's'},
        {"first", required_argument, NULL, 'f'},    {"keys", required_argument, NULL, 'k'},
        {"skip", required_argument, NULL, 'S'},     {"calls", required_argument, NULL, 'n'},    {"callers", required_argument, NULL, 'c'},
        {"connections", required_argument, NULL, 'C'}, {"rate", required_argument, NULL, 'r'},
        {"seconds", required_argument, NULL, 't'},  {"list", no_argument, NULL, 'l'},
        {0}};
    const char *request = NULL;
    for (int letter; (letter = getopt_long(count, arguments, "", known, NULL)) != -1;) switch (letter) {
        case 'a': options.address = optarg; break;
        case 'p': options.path = template_of(optarg, strlen(optarg)); break;
        case 'h': add_header(optarg); break;
        case 'q': request = optarg; break;
        case 'P': options.plain = true; break;
        case 'b': options.balance = true; break;
        case 'R': options.replayed = true; break;
        case 's': options.seed = strtoull(optarg, NULL, 10); break;
        case 'f': options.first = strtoull(optarg, NULL, 10); break;
        case 'k': options.keys = strtoull(optarg, NULL, 10); break;
        case 'S': options.skip = strtoull(optarg, NULL, 10); break;
        case 'n': options.calls = strtoull(optarg, NULL, 10); break;
        case 'c': options.callers = strtoul(optarg, NULL, 10); break;
        case 'C': options.connections = strtoul(optarg, NULL, 10); break;
        case 'r': options.rate = strtod(optarg, NULL); break;
        case 't': options.seconds = strtod(optarg, NULL); break;
        case 'l': options.list = true; break;
        default: exit(CANNOT_RUN);
        }
    if (options.list) return;
    if (options.address == NULL || options.path.bytes == NULL || request == NULL || options.callers == 0 ||
        options.connections == 0 || options.connections > CONNECTIONS_MAX || (options.calls == 0 && options.seconds == 0))
        errx(CANNOT_RUN, "needed: --address, --path, --request, --callers, --connections, and --calls or --seconds");
    options.request = request_of(request);
}

static int list_keys(void) {
    char key[KEY_LENGTH + 1];
    for (uint64_t i = 0; i < options.calls; i++) {
        make_key(options.first + i, key);
        puts(key);
    }
    return fflush(stdout) == 0 ? 0 : CANNOT_RUN;
}

int main(int count, char **arguments) {
    read_options(count, arguments);
    if (options.list) return list_keys();
    poller = epoll_create1(0);
    if (poller < 0) err(CANNOT_RUN, "epoll_create1");
    open_connections();
    if (options.balance) balance_connections();
    make_callers();
    run();
    return report();
}
