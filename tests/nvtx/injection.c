/* An NVTX tool for tests: loaded through NVTX_INJECTION64_PATH, it logs what a program does as JSON lines into the file
 * that KVCANARY_NVTX_LOG names. It implements what the tests look at and leaves every other function as it is. */
#define NVTX_NO_IMPL
#include <nvtx3/nvToolsExt.h>

#include "payloads.h"

#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static atomic_ullong next_handle = 1;

static unsigned long long new_handle(void)
{
    return atomic_fetch_add(&next_handle, 1);
}

static void log_thread(void)
{
    log_more(", \"thread\": %ld", (long)syscall(SYS_gettid));
}

static void log_domain(nvtxDomainHandle_t domain)
{
    log_more(", \"domain\": %llu", (unsigned long long)(uintptr_t)domain);
}

/* --- core ----------------------------------------------------------------------------------------------------------*/

static nvtxDomainHandle_t domain_create(const char *name)
{
    unsigned long long handle = new_handle();
    log_begin("domain");
    log_more(", \"id\": %llu", handle);
    log_text("name", name);
    log_end();
    return (nvtxDomainHandle_t)(uintptr_t)handle;
}

static nvtxStringHandle_t register_string(nvtxDomainHandle_t domain, const char *text)
{
    unsigned long long handle = new_handle();
    log_begin("string");
    log_domain(domain);
    log_more(", \"id\": %llu", handle);
    log_text("text", text);
    log_end();
    return (nvtxStringHandle_t)(uintptr_t)handle;
}

static void name_category(nvtxDomainHandle_t domain, uint32_t category, const char *name)
{
    log_begin("category");
    log_domain(domain);
    log_more(", \"id\": %u", category);
    log_text("name", name);
    log_end();
}

static void log_attributes(const nvtxEventAttributes_t *attributes)
{
    log_more(", \"category\": %u, \"color\": %u, \"payload_type\": %d", attributes->category,
             attributes->colorType == NVTX_COLOR_ARGB ? attributes->color : 0, attributes->payloadType);
    if (attributes->payloadType == NVTX_PAYLOAD_TYPE_INT64)
        log_more(", \"payload\": %lld", (long long)attributes->payload.llValue);
    if (attributes->messageType == NVTX_MESSAGE_TYPE_REGISTERED)
        log_more(", \"string\": %llu", (unsigned long long)(uintptr_t)attributes->message.registered);
    else if (attributes->messageType == NVTX_MESSAGE_TYPE_ASCII)
        log_text("message", attributes->message.ascii);
}

static int range_push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *attributes)
{
    log_begin("push");
    log_domain(domain);
    log_thread();
    log_attributes(attributes);
    log_end();
    return 0;
}

static int range_pop(nvtxDomainHandle_t domain)
{
    log_begin("pop");
    log_domain(domain);
    log_thread();
    log_end();
    return 0;
}

static NvtxFunctionPointer core_functions[NVTX_CBID_CORE2_SIZE] = {
    [NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)range_push,
    [NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)range_pop,
    [NVTX_CBID_CORE2_DomainNameCategoryA] = (NvtxFunctionPointer)name_category,
    [NVTX_CBID_CORE2_DomainRegisterStringA] = (NvtxFunctionPointer)register_string,
    [NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)domain_create,
};

EXPORT int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table)
{
    log_open("KVCANARY_NVTX_LOG");
    const NvtxExportTableCallbacks *callbacks = get_export_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable functions = NULL;
    unsigned int size = 0;
    if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &size))
        return 0;
    for (unsigned int i = 0; i < size && i < NVTX_CBID_CORE2_SIZE; i++)
        if (core_functions[i])
            *functions[i] = core_functions[i];
    return 1;
}

/* --- extensions ----------------------------------------------------------------------------------------------------*/

static uint64_t schema_register(nvtxDomainHandle_t domain, const nvtxPayloadSchemaAttr_t *attr)
{
    uint64_t id = ((uint64_t)1 << 32) + new_handle();
    log_begin("schema");
    log_domain(domain);
    log_schema(id, attr);
    log_end();
    return id;
}

static uint64_t scope_register(nvtxDomainHandle_t domain, const nvtxScopeAttr_t *attr)
{
    uint64_t id = ((uint64_t)1 << 32) + new_handle();
    log_begin("scope");
    log_domain(domain);
    log_more(", \"id\": %llu", (unsigned long long)id);
    log_text("path", attr->path);
    log_end();
    return id;
}

static int64_t timestamp_get(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static uint64_t counter_register(nvtxDomainHandle_t domain, const nvtxCounterAttr_t *attr)
{
    uint64_t id = NVTX_COUNTER_ID_DYNAMIC_START + new_handle();
    log_begin("counter");
    log_domain(domain);
    log_counter(id, attr);
    log_end();
    return id;
}

static void counter_batch(nvtxDomainHandle_t domain, const nvtxCounterBatch_t *batch)
{
    log_begin("batch");
    log_domain(domain);
    log_thread();
    log_counter_batch(batch);
    log_end();
}

static void set_slot(const nvtxExtModuleInfo_t *module, size_t slot, void *function)
{
    if (module->segmentsCount && slot < module->segments[0].slotCount)
        module->segments[0].functionSlots[slot] = (intptr_t)function;
}

EXPORT int InitializeInjectionNvtxExtension(nvtxExtModuleInfo_t *module)
{
    log_open("KVCANARY_NVTX_LOG");
    log_begin("module");
    log_more(", \"id\": %u", module->moduleId);
    log_end();
    if (module->moduleId == NVTX_EXT_PAYLOAD_MODULEID) {
        set_slot(module, NVTX3EXT_CBID_nvtxPayloadSchemaRegister, (void *)schema_register);
        set_slot(module, NVTX3EXT_CBID_nvtxTimestampGet, (void *)timestamp_get);
        set_slot(module, NVTX3EXT_CBID_nvtxScopeRegister, (void *)scope_register);
        return 1;
    }
    if (module->moduleId == NVTX_EXT_COUNTERS_MODULEID) {
        set_slot(module, NVTX3EXT_CBID_nvtxCounterRegister, (void *)counter_register);
        set_slot(module, NVTX3EXT_CBID_nvtxCounterBatchSubmit, (void *)counter_batch);
        return 1;
    }
    return 0;
}
