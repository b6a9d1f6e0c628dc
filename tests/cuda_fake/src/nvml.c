// libnvidia-ml: one device, of which nothing is known.
#include <string.h>

#define API(name, ...) int name(__VA_ARGS__)

static int found(void** device) { *device = (void*)1; return 0; }
API(nvmlInit_v2, void) { return 0; }
API(nvmlInit, void) { return 0; }
API(nvmlShutdown, void) { return 0; }
API(nvmlDeviceGetCount_v2, unsigned* count) { *count = 1; return 0; }
API(nvmlDeviceGetHandleByPciBusId_v2, const char* id, void** device) { return found(device); }
API(nvmlDeviceGetHandleByIndex_v2, unsigned index, void** device) { return found(device); }
API(nvmlDeviceGetHandleByUUID, const char* id, void** device) { return found(device); }
API(nvmlDeviceGetNvLinkRemoteDeviceType, void* device, unsigned link, int* type) { return 3; }
API(nvmlDeviceGetNvLinkRemotePciInfo_v2, void* device, unsigned link, void* info) { return 3; }
API(nvmlDeviceGetComputeRunningProcesses, void* device, unsigned* count, void* infos) { *count = 0; return 0; }
API(nvmlDeviceGetComputeRunningProcesses_v3, void* device, unsigned* count, void* infos) { *count = 0; return 0; }
API(nvmlDeviceGetGpuFabricInfoV, void* device, void* info) { memset((char*)info + 4, 0, 24); return 0; }
API(nvmlSystemGetCudaDriverVersion_v2, int* version) { *version = 13000; return 0; }
const char* nvmlErrorString(int error) { return "an error of the fake NVML"; }
