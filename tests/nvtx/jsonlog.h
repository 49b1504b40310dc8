/* A log of JSON lines, one event each, for the libraries that stand in for a tool. Threads write whole lines. */
#ifndef KVCANARY_JSONLOG_H
#define KVCANARY_JSONLOG_H

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static FILE *log_file;
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

/* Opens the file that an environment variable names; without it nothing is logged. */
static void log_open(const char *variable)
{
    const char *path = getenv(variable);
    if (!log_file && path)
        log_file = fopen(path, "a");
}

static void log_text(const char *key, const char *text)
{
    if (!log_file)
        return;
    fprintf(log_file, ", \"%s\": ", key);
    if (!text) {
        fputs("null", log_file);
        return;
    }
    fputc('"', log_file);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\')
            fprintf(log_file, "\\%c", *c);
        else if (*c < 0x20)
            fprintf(log_file, "\\u%04x", *c);
        else
            fputc(*c, log_file);
    }
    fputc('"', log_file);
}

static void log_hex(const char *key, const void *bytes, size_t size)
{
    if (!log_file)
        return;
    fprintf(log_file, ", \"%s\": \"", key);
    for (size_t i = 0; i < size; i++)
        fprintf(log_file, "%02x", ((const unsigned char *)bytes)[i]);
    fputc('"', log_file);
}

static void log_more(const char *format, ...)
{
    if (!log_file)
        return;
    va_list arguments;
    va_start(arguments, format);
    vfprintf(log_file, format, arguments);
    va_end(arguments);
}

static void log_begin(const char *event)
{
    pthread_mutex_lock(&log_lock);
    if (log_file)
        fprintf(log_file, "{\"event\": \"%s\"", event);
}

static void log_end(void)
{
    if (log_file) {
        fputs("}\n", log_file);
        fflush(log_file);
    }
    pthread_mutex_unlock(&log_lock);
}

/* An array of int64. */
static void log_times(const char *key, const int64_t *values, size_t count)
{
    if (!log_file)
        return;
    fprintf(log_file, ", \"%s\": [", key);
    for (size_t i = 0; i < count; i++)
        fprintf(log_file, i ? ", %lld" : "%lld", (long long)values[i]);
    fputc(']', log_file);
}

#endif
