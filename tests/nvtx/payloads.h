/* Schemas, semantics and counters of NVTX's payload and counter extensions, as JSON. */
#ifndef KVCANARY_PAYLOADS_H
#define KVCANARY_PAYLOADS_H

#include "jsonlog.h"

#include <nvtx3/nvToolsExtCounters.h>
#include <nvtx3/nvToolsExtPayload.h>
#include <nvtx3/nvToolsExtSemanticsCounters.h>
#include <nvtx3/nvToolsExtSemanticsTime.h>

static void log_limit(const char *key, const nvtxSemanticsCounter_t *of, int is_set, const void *value)
{
    if (!is_set)
        log_more(", \"%s\": null", key);
    else if (of->limitType == NVTX_COUNTER_LIMIT_F64)
        log_more(", \"%s\": %.17g", key, *(const double *)value);
    else
        log_more(", \"%s\": %lld", key, (long long)*(const int64_t *)value);
}

static void log_semantics(const nvtxSemanticsHeader_t *header)
{
    for (; header; header = header->next) {
        if (header->semanticId == NVTX_SEMANTIC_ID_TIME_V1) {
            log_more(", \"time_domain\": %llu",
                     (unsigned long long)((const nvtxSemanticsTime_t *)header)->timeDomainId);
        } else if (header->semanticId == NVTX_SEMANTIC_ID_COUNTERS_V1) {
            const nvtxSemanticsCounter_t *of = (const nvtxSemanticsCounter_t *)header;
            log_text("unit", of->unit);
            /* 1 point, 2 since last, 3 until next, 4 linear */
            log_more(", \"interpolation\": %llu", (unsigned long long)(of->flags >> 8 & 7));
            log_limit("min", of, (of->flags & NVTX_COUNTER_FLAG_LIMIT_MIN) != 0, &of->min);
            log_limit("max", of, (of->flags & NVTX_COUNTER_FLAG_LIMIT_MAX) != 0, &of->max);
        }
    }
}

static void log_schema(uint64_t id, const nvtxPayloadSchemaAttr_t *attr)
{
    int has_flags = (attr->fieldMask & NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_FLAGS) != 0;
    log_more(", \"id\": %llu, \"flags\": %llu, \"size\": %zu, \"entries\": [", (unsigned long long)id,
             (unsigned long long)(has_flags ? attr->flags : 0), attr->payloadStaticSize);
    for (size_t i = 0; i < attr->numEntries; i++) {
        const nvtxPayloadSchemaEntry_t *entry = &attr->entries[i];
        log_more("%s{\"type\": %llu, \"flags\": %llu, \"offset\": %llu, \"length\": %llu", i ? ", " : "",
                 (unsigned long long)entry->type, (unsigned long long)entry->flags,
                 (unsigned long long)entry->offset, (unsigned long long)entry->arrayOrUnionDetail);
        log_text("name", entry->name);
        log_semantics(entry->semantics);
        log_more("}");
    }
    log_more("]");
}

static void log_counter(uint64_t id, const nvtxCounterAttr_t *attr)
{
    log_more(", \"id\": %llu, \"schema\": %llu", (unsigned long long)id, (unsigned long long)attr->schemaId);
    log_text("name", attr->name);
    log_text("description", attr->description);
    log_semantics(attr->semantics);
}

static void log_counter_batch(const nvtxCounterBatch_t *batch)
{
    log_more(", \"counter\": %llu, \"flags\": %llu", (unsigned long long)batch->counterId,
             (unsigned long long)batch->flags);
    log_hex("data", batch->counters, batch->countersSize);
    log_times("times", batch->timestamps, batch->timestampsSize / sizeof(int64_t));
}

#endif
