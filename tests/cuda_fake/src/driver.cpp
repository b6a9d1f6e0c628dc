// libcuda: what torch's allocator and Triton ask of the driver.
#include "device.h"

#include <dlfcn.h>
#include <sys/mman.h>

using namespace fake;

#define API(name) extern "C" CUresult name
#define RETURN(error) return (CUresult)(error)
#define DONE return CUDA_SUCCESS
#define FAILED_DEVICE if (device().failed) RETURN(device().failed)

// Plain names and those of their newest version, which the header has.
static const std::map<std::string, std::string> newest = {
#include "driver_names.inc"
};

extern "C" void fake_missing(const char* name);
extern "C" void* fake_cuda_driver_symbol(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  auto found = newest.find(name);
  void* symbol = found == newest.end() ? nullptr : dlsym(driver ? driver : RTLD_DEFAULT, found->second.c_str());
  return symbol ? symbol : dlsym(driver ? driver : RTLD_DEFAULT, name);
}
API(cuGetProcAddress_v2)(const char* name, void** found, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  *found = fake_cuda_driver_symbol(name);
  if (result) *result = *found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  if (*found) DONE;
  fake_missing(name);
  RETURN(NOT_FOUND);
}

// --- the device and its context

static CUcontext context() { static int made[64]; return (CUcontext)made; }
API(cuInit)(unsigned) { DONE; }
API(cuDriverGetVersion)(int* version) { *version = 13000; DONE; }
API(cuDeviceGet)(CUdevice* found, int number) { *found = number; DONE; }
API(cuDeviceGetCount)(int* count) { *count = 1; DONE; }
API(cuDeviceGetName)(char* name, int size, CUdevice) { snprintf(name, size, "NVIDIA H100 80GB HBM3"); DONE; }
API(cuDeviceTotalMem_v2)(size_t* size, CUdevice) { *size = device().total; DONE; }
API(cuDeviceGetAttribute)(int* value, CUdevice_attribute number, CUdevice) { *value = attribute(number); DONE; }
API(cuCtxGetCurrent)(CUcontext* found) { *found = context(); DONE; }
API(cuCtxSetCurrent)(CUcontext) { DONE; }
API(cuCtxPushCurrent_v2)(CUcontext) { DONE; }
API(cuCtxPopCurrent_v2)(CUcontext* found) { if (found) *found = context(); DONE; }
API(cuCtxGetDevice)(CUdevice* found) { *found = 0; DONE; }
API(cuCtxSynchronize)() { RETURN(cudaDeviceSynchronize()); }
API(cuDevicePrimaryCtxRetain)(CUcontext* found, CUdevice) {
  device().has_context = true;
  *found = context();
  DONE;
}
API(cuDevicePrimaryCtxRelease_v2)(CUdevice) { DONE; }
API(cuDevicePrimaryCtxGetState)(CUdevice, unsigned* flags, int* active) { *flags = 0; *active = 1; DONE; }
API(cuGetErrorString)(CUresult error, const char** text) { *text = cudaGetErrorString((cudaError_t)error); DONE; }
API(cuGetErrorName)(CUresult error, const char** text) { *text = cudaGetErrorName((cudaError_t)error); DONE; }
API(cuMemGetInfo_v2)(size_t* free_bytes, size_t* total) { RETURN(cudaMemGetInfo(free_bytes, total)); }
API(cuMemAlloc_v2)(CUdeviceptr* found, size_t size) { RETURN(cudaMalloc((void**)found, size)); }
API(cuMemFree_v2)(CUdeviceptr pointer) { RETURN(cudaFree((void*)pointer)); }
API(cuMemsetD32Async)(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  RETURN(launch("memset", stream_of(stream), [=] { std::fill_n((unsigned*)to, count, value); }));
}
API(cuStreamSynchronize)(CUstream stream) { RETURN(cudaStreamSynchronize(stream)); }
API(cuPointerGetAttribute)(void* value, CUpointer_attribute which, CUdeviceptr pointer) {
  const void* start = nullptr;
  auto* range = range_at((void*)pointer, &start);
  switch (which) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      if (!range) RETURN(INVALID_VALUE);
      *(CUdeviceptr*)value = pointer;
      DONE;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      if (!range) RETURN(INVALID_VALUE);
      *(int*)value = range->memory == Memory::DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      DONE;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(uint64_t*)value = (uint64_t)start; DONE;
    default: *(int*)value = 0; DONE;
  }
}

// --- virtual memory, of which expandable segments are made

struct Physical { size_t size; int num_maps; bool held; };
struct Map { size_t size; uint64_t physical; };
static std::map<uint64_t, Physical> physicals;
static std::map<uintptr_t, Map> maps;
static uint64_t next_physical = 1;

static void free_if_unused(uint64_t handle) {
  auto& physical = physicals[handle];
  if (physical.held || physical.num_maps) return;
  give_back(physical.size);
  physicals.erase(handle);
}
static void reserve_again(void* start, size_t size) {
  mmap(start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
API(cuMemGetAllocationGranularity)(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { *size = 2 << 20; DONE; }
API(cuMemAddressReserve)(CUdeviceptr* found, size_t size, size_t, CUdeviceptr, unsigned long long) {
  size_t page = 2 << 20;
  void* start = mmap(nullptr, size + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) RETURN(OUT_OF_MEMORY);
  *found = ((uintptr_t)start + page - 1) & ~(uintptr_t)(page - 1);
  DONE;
}
API(cuMemAddressFree)(CUdeviceptr start, size_t size) { munmap((void*)start, size); DONE; }
API(cuMemCreate)(CUmemGenericAllocationHandle* made, size_t size, const CUmemAllocationProp*, unsigned long long) {
  count("cuMemCreate");
  FAILED_DEVICE;
  Lock lock(mutex);
  if (!take(size)) RETURN(OUT_OF_MEMORY);
  *made = next_physical++;
  physicals[*made] = {size, 0, true};
  DONE;
}
API(cuMemRelease)(CUmemGenericAllocationHandle handle) {
  Lock lock(mutex);
  if (!physicals.count(handle)) RETURN(INVALID_VALUE);
  physicals[handle].held = false;
  free_if_unused(handle);
  DONE;
}
API(cuMemMap)(CUdeviceptr start, size_t size, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  Lock lock(mutex);
  if (!physicals.count(handle) || physicals[handle].size != size) RETURN(INVALID_VALUE);
  physicals[handle].num_maps++;
  maps[start] = {size, handle};
  add_range((void*)start, size, Memory::DEVICE);
  DONE;
}
API(cuMemSetAccess)(CUdeviceptr start, size_t size, const CUmemAccessDesc*, size_t) {
  mprotect((void*)start, size, PROT_READ | PROT_WRITE);
  DONE;
}
API(cuMemUnmap)(CUdeviceptr start, size_t size) {
  FAILED_DEVICE;
  synchronize_all();
  Lock lock(mutex);
  for (auto map = maps.lower_bound(start); map != maps.end() && map->first < start + size;) {
    uint64_t handle = map->second.physical;
    device().ranges.erase(map->first);
    physicals[handle].num_maps--;
    map = maps.erase(map);
    free_if_unused(handle);
  }
  reserve_again((void*)start, size);
  DONE;
}
API(cuMemRetainAllocationHandle)(CUmemGenericAllocationHandle* found, void* pointer) {
  auto map = maps.find((uintptr_t)pointer);
  if (map == maps.end()) RETURN(INVALID_VALUE);
  *found = map->second.physical;
  DONE;
}
API(cuMemGetAllocationPropertiesFromHandle)(CUmemAllocationProp* found, CUmemGenericAllocationHandle) {
  memset(found, 0, sizeof *found);
  found->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  found->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  DONE;
}
API(cuMemGetAddressRange_v2)(CUdeviceptr* start, size_t* size, CUdeviceptr pointer) {
  const void* found;
  auto* range = range_at((void*)pointer, &found);
  if (!range) RETURN(INVALID_VALUE);
  if (start) *start = (CUdeviceptr)found;
  if (size) *size = range->size;
  DONE;
}

// --- kernels of Triton, which are their names

struct Function { std::string name; };
API(cuModuleLoadData)(CUmodule* found, const void*) {
  count("cuModuleLoadData");
  if (int error = refused_in_capture("cuModuleLoadData")) RETURN(error);
  FAILED_DEVICE;
  static int made;
  *found = (CUmodule)&made;
  DONE;
}
API(cuModuleLoadDataEx)(CUmodule* found, const void* data, unsigned, CUjit_option*, void**) { return cuModuleLoadData(found, data); }
API(cuModuleUnload)(CUmodule) { DONE; }
API(cuModuleGetFunction)(CUfunction* found, CUmodule, const char* name) { *found = (CUfunction) new Function{name}; DONE; }
API(cuModuleGetGlobal_v2)(CUdeviceptr*, size_t*, CUmodule, const char*) { RETURN(NOT_FOUND); }
API(cuFuncGetAttribute)(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  DONE;
}
API(cuFuncSetAttribute)(CUfunction, CUfunction_attribute, int) { DONE; }
API(cuFuncSetCacheConfig)(CUfunction, CUfunc_cache) { DONE; }
API(cuOccupancyMaxActiveClusters)(int* clusters, CUfunction, const CUlaunchConfig*) { *clusters = 16; DONE; }
API(cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, CUfunction, int, size_t) { *blocks = 2; DONE; }
static CUresult launch_nothing(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, CUstream stream) {
  std::string name = ((Function*)function)->name;
  if (!x || !y || !z || y > 65535 || z > 65535 || !threads || threads > 1024) {
    violation("grid or block out of range: " + name);
    RETURN(INVALID_VALUE);
  }
  count("kernels of Triton");
  RETURN(launch(name, stream_of(stream)));
}
API(cuLaunchKernel)(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                    unsigned, CUstream stream, void**, void**) {
  return launch_nothing(function, gx, gy, gz, bx * by * bz, stream);
}
API(cuLaunchKernelEx)(const CUlaunchConfig* how, CUfunction function, void**, void**) {
  unsigned threads = how->blockDimX * how->blockDimY * how->blockDimZ;
  return launch_nothing(function, how->gridDimX, how->gridDimY, how->gridDimZ, threads, how->hStream);
}
API(cuLaunchCooperativeKernel)(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned, CUstream stream, void**) {
  return launch_nothing(function, gx, gy, gz, bx * by * bz, stream);
}
