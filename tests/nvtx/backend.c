/* An NVTXW backend for tests: it logs what it is given as JSON lines into the file that KVCANARY_NVTXW_LOG names.
 * A session named "refuse" is refused; with the option fail=events every batch of events fails. */
#define NVTX_NO_IMPL
#include <nvtx3/nvToolsExt.h>
#include <nvtxw3/nvtxw3.h>

#include "payloads.h"

#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static uint64_t handles = 1;
static int events_fail;

static uint64_t new_handle(void)
{
    return handles++;
}

static unsigned long long number(const void *handle)
{
    return (unsigned long long)(uintptr_t)handle;
}

static nvtxwResultCode_t session_begin(const nvtxwSessionAttributes_t *attr, nvtxwSessionHandle_t *out)
{
    if (attr->name && !strcmp(attr->name, "refuse"))
        return NVTXW_RESULT_FAILED;
    events_fail = attr->configString && strstr(attr->configString, "fail=events") != NULL;
    *out = (nvtxwSessionHandle_t)(uintptr_t)new_handle();
    log_begin("session");
    log_text("name", attr->name);
    log_text("config", attr->configString);
    log_end();
    return NVTXW_RESULT_SUCCESS;
}

static nvtxwResultCode_t session_end(nvtxwSessionHandle_t session)
{
    log_begin("session_end");
    log_more(", \"id\": %llu", number(session));
    log_end();
    return NVTXW_RESULT_SUCCESS;
}

static nvtxwResultCode_t domain_register(nvtxwSessionHandle_t session, const nvtxwDomainAttributes_t *attr,
                                         nvtxDomainHandle_t *out)
{
    (void)session;
    *out = (nvtxDomainHandle_t)(uintptr_t)new_handle();
    log_begin("domain");
    log_more(", \"id\": %llu", number(*out));
    log_text("name", attr ? attr->name : NULL);
    log_end();
    return NVTXW_RESULT_SUCCESS;
}

static nvtxwResultCode_t category_register(nvtxDomainHandle_t domain, uint32_t category, const char *name)
{
    (void)domain;
    log_begin("category");
    log_more(", \"id\": %u", category);
    log_text("name", name);
    log_end();
    return NVTXW_RESULT_SUCCESS;
}

static nvtxwResultCode_t string_register(nvtxDomainHandle_t domain, const char *text, nvtxStringHandle_t *out)
{
    (void)domain;
    *out = (nvtxStringHandle_t)(uintptr_t)new_handle();
    log_begin("string");
    log_more(", \"id\": %llu", number(*out));
    log_text("text", text);
    log_end();
    return NVTXW_RESULT_SUCCESS;
}

static nvtxwResultCode_t resource_register(nvtxDomainHandle_t domain, const nvtxResourceAttributes_t *attr)
{
    (void)domain, (void)attr;
    return NVTXW_RESULT_NOT_SUPPORTED;
}

static nvtxwResultCode_t scope_register(nvtxDomainHandle_t domain, const nvtxScopeAttr_t *attr, uint64_t *out)
{
    (void)domain;
    *out = ((uint64_t)1 << 32) + new_handle();
    log_begin("scope");
    log_more(", \"id\": %llu", (unsigned long long)*out);
    log_text("path", attr->path);
    log_end();
    return NVTXW_RESULT_SUCCESS;
}

static nvtxwResultCode_t schema_register(nvtxDomainHandle_t domain, const nvtxPayloadSchemaAttr_t *attr, uint64_t *out)
{
    (void)domain;
    *out = ((uint64_t)1 << 32) + new_handle();
    log_begin("schema");
    log_schema(*out, attr);
    log_end();
    return NVTXW_RESULT_SUCCESS;
}

static nvtxwResultCode_t enum_register(nvtxDomainHandle_t domain, const nvtxPayloadEnumAttr_t *attr, uint64_t *out)
{
    (void)domain, (void)attr, (void)out;
    return NVTXW_RESULT_NOT_SUPPORTED;
}

static nvtxwResultCode_t counter_register(nvtxDomainHandle_t domain, const nvtxCounterAttr_t *attr, uint64_t *out)
{
    (void)domain;
    *out = ((uint64_t)1 << 32) + new_handle();
    log_begin("counter");
    log_more(", \"scope\": %llu", (unsigned long long)attr->scopeId);
    log_counter(*out, attr);
    log_end();
    return NVTXW_RESULT_SUCCESS;
}

static nvtxwResultCode_t time_domain_register(nvtxDomainHandle_t domain, const nvtxTimeDomainAttr_t *attr, uint64_t *out)
{
    (void)domain, (void)attr, (void)out;
    return NVTXW_RESULT_NOT_SUPPORTED;
}

static nvtxwResultCode_t stream_open(nvtxwSessionHandle_t session, const nvtxwStreamAttributes_t *attr,
                                     nvtxwStreamHandle_t *out)
{
    (void)session;
    *out = (nvtxwStreamHandle_t)(uintptr_t)new_handle();
    log_begin("stream");
    log_more(", \"id\": %llu, \"domain\": %llu, \"scope\": %llu, \"time_domain\": %llu", number(*out),
             number(attr->domain), (unsigned long long)attr->scopeId, (unsigned long long)attr->timeDomainId);
    log_text("name", attr->name);
    log_end();
    return NVTXW_RESULT_SUCCESS;
}

static nvtxwResultCode_t stream_close(nvtxwStreamHandle_t stream)
{
    log_begin("stream_close");
    log_more(", \"id\": %llu", number(stream));
    log_end();
    return NVTXW_RESULT_SUCCESS;
}

static nvtxwResultCode_t event_write(nvtxwStreamHandle_t stream, const nvtxPayloadData_t *payloads, size_t count)
{
    (void)stream, (void)payloads, (void)count;
    return NVTXW_RESULT_NOT_SUPPORTED;
}

static nvtxwResultCode_t event_batch_write(nvtxwStreamHandle_t stream, const nvtxEventBatch_t *batch)
{
    if (events_fail)
        return NVTXW_RESULT_FAILED;
    log_begin("events");
    log_more(", \"stream\": %llu, \"schema\": %llu, \"flags\": %llu", number(stream),
             (unsigned long long)batch->eventSchemaId, (unsigned long long)batch->flags);
    log_hex("data", batch->events, batch->size);
    log_end();
    return NVTXW_RESULT_SUCCESS;
}

static nvtxwResultCode_t counter_write(nvtxwStreamHandle_t stream, int64_t time, uint64_t counter, const void *data,
                                       size_t size)
{
    (void)stream, (void)time, (void)counter, (void)data, (void)size;
    return NVTXW_RESULT_NOT_SUPPORTED;
}

static nvtxwResultCode_t counter_no_value_write(nvtxwStreamHandle_t stream, int64_t time, uint64_t counter,
                                                uint8_t reason)
{
    (void)stream, (void)time, (void)counter, (void)reason;
    return NVTXW_RESULT_NOT_SUPPORTED;
}

static nvtxwResultCode_t counter_batch_write(nvtxwStreamHandle_t stream, const nvtxCounterBatch_t *batch)
{
    log_begin("batch");
    log_more(", \"stream\": %llu", number(stream));
    log_counter_batch(batch);
    log_end();
    return NVTXW_RESULT_SUCCESS;
}

static nvtxwResultCode_t sync_point_write(nvtxwStreamHandle_t stream, uint64_t one, uint64_t other, int64_t time_one,
                                          int64_t time_other)
{
    (void)stream, (void)one, (void)other, (void)time_one, (void)time_other;
    return NVTXW_RESULT_NOT_SUPPORTED;
}

static nvtxwResultCode_t sync_table_write(nvtxwStreamHandle_t stream, uint64_t one, uint64_t other,
                                          const nvtxSyncPoint_t *points, size_t count)
{
    (void)stream, (void)one, (void)other, (void)points, (void)count;
    return NVTXW_RESULT_NOT_SUPPORTED;
}

static nvtxwResultCode_t conversion_write(nvtxwStreamHandle_t stream, uint64_t one, uint64_t other, double slope,
                                          int64_t time_one, int64_t time_other)
{
    (void)stream, (void)one, (void)other, (void)slope, (void)time_one, (void)time_other;
    return NVTXW_RESULT_NOT_SUPPORTED;
}

static const nvtxwInterface_v2_t interface = {
    .SessionBegin = session_begin,
    .SessionEnd = session_end,
    .DomainRegister = domain_register,
    .CategoryRegister = category_register,
    .StringRegister = string_register,
    .ResourceRegister = resource_register,
    .ScopeRegister = scope_register,
    .SchemaRegister = schema_register,
    .EnumRegister = enum_register,
    .CounterRegister = counter_register,
    .TimeDomainRegister = time_domain_register,
    .StreamOpen = stream_open,
    .StreamClose = stream_close,
    .EventWrite = event_write,
    .EventBatchWrite = event_batch_write,
    .CounterWrite = counter_write,
    .CounterNoValueWrite = counter_no_value_write,
    .CounterBatchWrite = counter_batch_write,
    .TimeSyncPointWrite = sync_point_write,
    .TimeSyncPointTableWrite = sync_table_write,
    .TimestampConversionFactorWrite = conversion_write,
};

EXPORT nvtxwResultCode_t nvtxwGetInterface(nvtxwInterfaceVersion_t version, const void **out)
{
    if (version != NVTXW_INTERFACE_VERSION)
        return NVTXW_RESULT_INTERFACE_VERSION_NOT_SUPPORTED;
    log_open("KVCANARY_NVTXW_LOG");
    *out = &interface;
    return NVTXW_RESULT_SUCCESS;
}

EXPORT void nvtxwFinalize(void)
{
    log_begin("finalize");
    log_end();
}
