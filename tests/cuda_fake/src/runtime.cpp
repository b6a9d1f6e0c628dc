// libcudart: the runtime's calls that torch makes, and what the tests ask of the device.
#include "device.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>

using namespace fake;

#define API(name) extern "C" cudaError_t name
#define RETURN(error) return (cudaError_t)remember(error)
#define DONE return cudaSuccess
#define COUNTED(name) count(#name)
#define REFUSED_IN_CAPTURE(name) if (int error = refused_in_capture(#name)) RETURN(error)
#define FAILED_DEVICE if (device().failed) RETURN(device().failed)

// --- what the tests ask

extern "C" void fake_missing(const char* name) {
  Lock lock(mutex);
  if (!device().missing[name]++) fprintf(stderr, "[fake CUDA] there is no %s\n", name);
}
extern "C" void fake_cuda_phase(const char* name) {
  Lock lock(mutex);
  device().phase = name;
}
extern "C" void fake_cuda_begin() {
  Lock lock(mutex);
  device().counts.clear();
  device().violations.clear();
  device().peak = device().used;
}
extern "C" void fake_cuda_fail_allocation(long after) { device().allocations_until_failure = after; }
extern "C" void fake_cuda_fail_registration(long after) { device().registrations_until_failure = after; }
extern "C" void fake_cuda_fail_device(int error) { device().failed = error; }
extern "C" void fake_cuda_memory(size_t total, size_t others) {
  device().total = total;
  device().others = others;
}
extern "C" size_t fake_cuda_in_use() { return device().in_use(); }
extern "C" int fake_cuda_is_late() { return device().late; }
extern "C" void fake_cuda_set_late(int late, uint64_t seed) {
  synchronize_all();
  device().late = late;
  device().random = seed;
}
// Device memory that counts nowhere: room for kernels that are computed on the CPU.
extern "C" void* fake_cuda_room(size_t size) {
  Lock lock(mutex);
  void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  add_range(start, size, Memory::DEVICE);
  return start;
}
extern "C" int fake_cuda_launch(void* stream, const char* name, void (*run)(uint64_t), uint64_t id) {
  return launch(name, stream_of(stream), [run, id] { run(id); });
}

static std::string json(const std::map<std::string, uint64_t>& values) {
  std::string text;
  for (auto& [name, value] : values) {
    std::string plain;
    for (char c : name)
      if (c != '"' && c != '\\' && (unsigned char)c >= 32) plain += c;
    text += (text.empty() ? "{\"" : ", \"") + plain + "\": " + std::to_string(value);
  }
  return text.empty() ? "{}" : text + "}";
}

// JSON: what is left of everything, violations, and counts by phase. Valid until the next call.
extern "C" const char* fake_cuda_report() {
  Lock lock(mutex);
  static std::string text;
  auto& d = device();
  uint64_t queued = 0, registered = 0;
  for (auto& stream : d.streams) queued += stream->queue.size();
  for (auto& [_, range] : d.ranges) registered += range.memory == Memory::HOST_REGISTERED;
  text = "{\"left\": " + json({{"used", d.used}, {"peak", d.peak}, {"pinned", d.pinned}, {"queued", queued},
                               {"registered", registered}, {"events", d.live_events},
                               {"graphs", d.live_graphs}, {"executables", d.live_executables}});
  text += ", \"violations\": " + json(d.violations) + ", \"missing\": " + json(d.missing) + ", \"counts\": {";
  bool is_first = true;
  for (auto& [phase, counts] : d.counts) {
    text += (is_first ? "\"" : ", \"") + phase + "\": " + json(counts);
    is_first = false;
  }
  text += "}}";
  return text.c_str();
}

// --- the device

API(cudaGetDeviceCount)(int* count) { *count = 1; DONE; }
API(cudaGetDevice)(int* number) { *number = 0; DONE; }
API(cudaSetDevice)(int number) {
  if (number) RETURN(INVALID_DEVICE);
  device().has_context = true;
  DONE;
}
API(cudaDriverGetVersion)(int* version) { *version = 13000; DONE; }
API(cudaRuntimeGetVersion)(int* version) { *version = 13000; DONE; }
API(cudaDeviceGetAttribute)(int* value, cudaDeviceAttr number, int) { *value = attribute(number); DONE; }
API(cudaDeviceGetStreamPriorityRange)(int* least, int* greatest) { *least = 0; *greatest = -5; DONE; }
API(cudaDeviceCanAccessPeer)(int* can, int, int) { *can = 1; DONE; }
API(cudaDeviceEnablePeerAccess)(int, unsigned) { DONE; }
API(cudaDeviceGetPCIBusId)(char* text, int size, int) { snprintf(text, size, "0000:01:00.0"); DONE; }
API(cudaGetDeviceProperties)(cudaDeviceProp* found, int) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "NVIDIA H100 80GB HBM3");
  memset(&found->uuid, 0x11, 16);
  found->totalGlobalMem = device().total;
  found->major = attribute(75);
  found->multiProcessorCount = attribute(16);
  found->warpSize = attribute(10);
  found->regsPerBlock = attribute(12);
  found->sharedMemPerBlock = attribute(8);
  found->sharedMemPerBlockOptin = attribute(97);
  found->sharedMemPerMultiprocessor = attribute(81);
  found->regsPerMultiprocessor = attribute(82);
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = attribute(1);
  found->maxThreadsDim[2] = attribute(4);
  found->maxThreadsPerMultiProcessor = attribute(39);
  found->maxBlocksPerMultiProcessor = attribute(106);
  found->maxGridSize[0] = attribute(5);
  found->maxGridSize[1] = found->maxGridSize[2] = attribute(6);
  found->memoryBusWidth = attribute(37);
  found->l2CacheSize = attribute(38);
  found->asyncEngineCount = attribute(40);
  found->pciBusID = 1;
  found->canMapHostMemory = found->concurrentKernels = found->ECCEnabled = found->unifiedAddressing = 1;
  found->managedMemory = found->cooperativeLaunch = found->clusterLaunch = found->memoryPoolsSupported = 1;
  found->hostRegisterSupported = found->streamPrioritiesSupported = 1;
  DONE;
}
API(cudaDeviceSynchronize)() {
  COUNTED(cudaDeviceSynchronize);
  REFUSED_IN_CAPTURE(cudaDeviceSynchronize);
  FAILED_DEVICE;
  RETURN(synchronize_all());
}
API(cudaGetLastError)() {
  int error = last_error();
  last_error() = SUCCESS;
  return (cudaError_t)error;
}
API(cudaPeekAtLastError)() { return (cudaError_t)last_error(); }
extern "C" const char* cudaGetErrorString(cudaError_t error) {
  switch ((int)error) {
    case SUCCESS: return "no error";
    case OUT_OF_MEMORY: return "out of memory";
    case ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    case CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing";
    case CAPTURE_INVALIDATED: return "operation failed due to a previous error during capture";
    default: return "an error";
  }
}
extern "C" const char* cudaGetErrorName(cudaError_t error) {
  static thread_local char name[32];
  snprintf(name, sizeof name, "cudaError %d", (int)error);
  return name;
}
API(cudaProfilerStart)() { DONE; }
API(cudaProfilerStop)() { DONE; }

// --- memory

API(cudaMemGetInfo)(size_t* free_bytes, size_t* total) {
  FAILED_DEVICE;
  Lock lock(mutex);
  auto& d = device();
  d.has_context = true;
  *total = d.total;
  *free_bytes = d.in_use() > d.total ? 0 : d.total - d.in_use();
  DONE;
}
API(cudaMalloc)(void** found, size_t size) {
  COUNTED(cudaMalloc);
  REFUSED_IN_CAPTURE(cudaMalloc);
  FAILED_DEVICE;
  Lock lock(mutex);
  *found = allocate(size);
  RETURN(*found ? SUCCESS : OUT_OF_MEMORY);
}
API(cudaFree)(void* pointer) {
  COUNTED(cudaFree);
  REFUSED_IN_CAPTURE(cudaFree);
  FAILED_DEVICE;
  if (!pointer) DONE;
  synchronize_all();
  Lock lock(mutex);
  RETURN(release(pointer));
}
API(cudaMallocAsync)(void** found, size_t size, cudaStream_t) { return cudaMalloc(found, size); }
API(cudaFreeAsync)(void* pointer, cudaStream_t) { return cudaFree(pointer); }
API(cudaHostAlloc)(void** found, size_t size, unsigned) {
  COUNTED(cudaHostAlloc);
  REFUSED_IN_CAPTURE(cudaHostAlloc);
  FAILED_DEVICE;
  Lock lock(mutex);
  *found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  add_range(*found, size, Memory::HOST_ALLOCATED);
  device().pinned += size;
  DONE;
}
API(cudaFreeHost)(void* pointer) {
  COUNTED(cudaFreeHost);
  synchronize_all();
  Lock lock(mutex);
  auto* range = range_at(pointer);
  if (!range || range->memory != Memory::HOST_ALLOCATED) RETURN(INVALID_VALUE);
  size_t size = range->size;
  device().ranges.erase((uintptr_t)pointer);
  munmap(pointer, size);
  device().pinned -= size;
  DONE;
}
API(cudaHostRegister)(void* pointer, size_t size, unsigned) {
  COUNTED(cudaHostRegister);
  REFUSED_IN_CAPTURE(cudaHostRegister);
  FAILED_DEVICE;
  Lock lock(mutex);
  auto& d = device();
  d.has_context = true;
  if (d.registrations_until_failure >= 0 && d.registrations_until_failure-- == 0) RETURN(OUT_OF_MEMORY);
  if (range_at(pointer) || range_at((char*)pointer + size - 1)) RETURN(ALREADY_REGISTERED);
  if ((uintptr_t)pointer & 4095) violation("registered memory does not begin with a page");
  add_range(pointer, size, Memory::HOST_REGISTERED);
  d.pinned += size;
  DONE;
}
API(cudaHostUnregister)(void* pointer) {
  COUNTED(cudaHostUnregister);
  Lock lock(mutex);
  for (auto& stream : device().streams)
    if (!stream->queue.empty()) violation("cudaHostUnregister while work is queued");
  auto found = device().ranges.find((uintptr_t)pointer);
  bool is_ours = found != device().ranges.end() && found->second.memory == Memory::HOST_REGISTERED;
  if (!is_ours) RETURN(NOT_REGISTERED);
  device().pinned -= found->second.size;
  device().ranges.erase(found);
  DONE;
}
API(cudaPointerGetAttributes)(cudaPointerAttributes* found, const void* pointer) {
  Lock lock(mutex);
  memset(found, 0, sizeof *found);
  auto* range = range_at(pointer);
  found->type = !range                             ? cudaMemoryTypeUnregistered
                : range->memory == Memory::DEVICE ? cudaMemoryTypeDevice
                                                   : cudaMemoryTypeHost;
  found->device = range ? 0 : -2;
  if (range) found->devicePointer = (void*)pointer;
  if (found->type == cudaMemoryTypeHost) found->hostPointer = (void*)pointer;
  DONE;
}
API(cudaMemcpyAsync)(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  RETURN(copy(to, from, size, stream_of(stream), "cudaMemcpyAsync"));
}
API(cudaMemcpyPeerAsync)(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  RETURN(copy(to, from, size, stream_of(stream), "cudaMemcpyPeerAsync"));
}
API(cudaMemcpy)(void* to, const void* from, size_t size, cudaMemcpyKind) {
  REFUSED_IN_CAPTURE(cudaMemcpy);
  COUNTED(cudaMemcpy);
  int error = copy(to, from, size, stream_of(nullptr), "cudaMemcpy");
  RETURN(error ? error : synchronize(stream_of(nullptr)));
}
API(cudaMemsetAsync)(void* to, int value, size_t size, cudaStream_t stream) {
  RETURN(launch("memset", stream_of(stream), [=] { memset(to, value, size); }));
}
API(cudaMemset)(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, nullptr); }
API(cudaMemcpyToSymbol)(const void*, const void*, size_t, size_t, cudaMemcpyKind) { DONE; }
API(cudaGetSymbolAddress)(void** found, const void*) {
  static char symbol[4096];
  *found = symbol;
  DONE;
}
API(cudaDeviceGetDefaultMemPool)(cudaMemPool_t* pool, int) {
  static int made;
  *pool = (cudaMemPool_t)&made;
  DONE;
}
API(cudaMemPoolGetAttribute)(cudaMemPool_t, cudaMemPoolAttr, void* value) { *(uint64_t*)value = 0; DONE; }
API(cudaMemPoolSetAttribute)(cudaMemPool_t, cudaMemPoolAttr, void*) { DONE; }
API(cudaMemPoolTrimTo)(cudaMemPool_t, size_t) { DONE; }
API(cudaDeviceGetGraphMemAttribute)(int, cudaGraphMemAttributeType, void* value) { *(uint64_t*)value = 0; DONE; }

// --- streams

API(cudaStreamCreateWithPriority)(cudaStream_t* made, unsigned, int priority) {
  COUNTED(cudaStreamCreate);
  FAILED_DEVICE;
  Lock lock(mutex);
  stream_of(nullptr);
  auto& d = device();
  d.has_context = true;
  d.streams.emplace_back(new Stream{d.next_id++, priority});
  *made = (cudaStream_t)d.streams.back().get();
  DONE;
}
API(cudaStreamCreateWithFlags)(cudaStream_t* made, unsigned flags) { return cudaStreamCreateWithPriority(made, flags, 0); }
API(cudaStreamCreate)(cudaStream_t* made) { return cudaStreamCreateWithPriority(made, 0, 0); }
API(cudaStreamDestroy)(cudaStream_t stream) { RETURN(synchronize(stream_of(stream))); }
API(cudaStreamGetPriority)(cudaStream_t stream, int* priority) { *priority = stream_of(stream)->priority; DONE; }
API(cudaStreamSynchronize)(cudaStream_t handle) {
  COUNTED(cudaStreamSynchronize);
  auto* stream = stream_of(handle);
  if (stream->capture) {
    stream->capture->status = Capture::INVALID;
    violation("cudaStreamSynchronize of a stream that is captured");
    RETURN(CAPTURE_UNSUPPORTED);
  }
  REFUSED_IN_CAPTURE(cudaStreamSynchronize);
  FAILED_DEVICE;
  RETURN(synchronize(stream));
}

// A query is answered after one more thing has run, so that whoever polls gets on.
static bool comes_true(const std::function<bool()>& done) {
  Lock lock(mutex);
  int turns = 0;
  if (!done()) run_until(lock, [&] { return turns++ > 0 || done(); });
  return done();
}
API(cudaStreamQuery)(cudaStream_t handle) {
  REFUSED_IN_CAPTURE(cudaStreamQuery);
  FAILED_DEVICE;
  auto* stream = stream_of(handle);
  return comes_true([stream] { return stream->queue.empty(); }) ? cudaSuccess : cudaErrorNotReady;
}

// --- captures

API(cudaStreamIsCapturing)(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  auto* capture = stream_of(stream)->capture;
  *status = (cudaStreamCaptureStatus)(capture ? capture->status : 0);
  DONE;
}
API(cudaStreamGetCaptureInfo)(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                              cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                              const cudaGraphEdgeData** edges, size_t* size) {
  auto* capture = stream_of(stream)->capture;
  *status = (cudaStreamCaptureStatus)(capture ? capture->status : 0);
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? (cudaGraph_t)capture->graph : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (size) *size = 0;
  DONE;
}
API(cudaStreamUpdateCaptureDependencies)(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) { DONE; }
API(cudaThreadExchangeStreamCaptureMode)(cudaStreamCaptureMode* mode) {
  int before = capture_mode();
  capture_mode() = *mode;
  *mode = (cudaStreamCaptureMode)before;
  DONE;
}
API(cudaStreamBeginCapture)(cudaStream_t handle, cudaStreamCaptureMode mode) {
  COUNTED(cudaStreamBeginCapture);
  FAILED_DEVICE;
  Lock lock(mutex);
  auto& d = device();
  auto* stream = stream_of(handle);
  if (stream == d.legacy_stream) RETURN(CAPTURE_UNSUPPORTED);
  if (stream->capture) RETURN(INVALID_VALUE);
  stream->capture = new Capture{new Graph, (int)mode, std::this_thread::get_id(), Capture::ACTIVE, d.next_id++};
  d.captures.push_back(stream->capture);
  d.live_graphs++;
  DONE;
}
API(cudaStreamBeginCaptureToGraph)(cudaStream_t stream, cudaGraph_t, const cudaGraphNode_t*,
                                   const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(stream, mode);
}
API(cudaStreamEndCapture)(cudaStream_t handle, cudaGraph_t* graph) {
  Lock lock(mutex);
  auto& d = device();
  auto* capture = stream_of(handle)->capture;
  if (!capture) RETURN(CAPTURE_INVALIDATED);
  if (capture->thread != std::this_thread::get_id()) violation("a capture ends in another thread");
  for (auto& stream : d.streams)
    if (stream->capture == capture) stream->capture = nullptr;
  d.captures.erase(std::find(d.captures.begin(), d.captures.end(), capture));
  bool valid = capture->status == Capture::ACTIVE;
  *graph = valid ? (cudaGraph_t)capture->graph : nullptr;
  if (!valid) {
    delete capture->graph;
    d.live_graphs--;
    count("captures refused");
  }
  delete capture;
  RETURN(valid ? SUCCESS : CAPTURE_INVALIDATED);
}

// --- events

API(cudaEventCreateWithFlags)(cudaEvent_t* made, unsigned flags) {
  COUNTED(cudaEventCreate);
  FAILED_DEVICE;
  Lock lock(mutex);
  device().live_events++;
  *made = (cudaEvent_t) new Event{flags};
  DONE;
}
API(cudaEventCreate)(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
API(cudaEventDestroy)(cudaEvent_t) {  // not deleted: what is queued may name it
  Lock lock(mutex);
  device().live_events--;
  DONE;
}
API(cudaEventRecordWithFlags)(cudaEvent_t handle, cudaStream_t on, unsigned flags) {
  Lock lock(mutex);
  auto* event = (Event*)handle;
  auto* stream = stream_of(on);
  if (stream->capture) {
    if (stream->capture->status != Capture::ACTIVE) RETURN(CAPTURE_INVALIDATED);
    if (!(flags & cudaEventRecordExternal)) {
      event->captured = stream->capture;
      count("records in a capture, not external");
      DONE;
    }
    auto node = std::make_shared<Node>(Node{Node::RECORD, "record"});
    node->event = event;
    stream->capture->graph->nodes.push_back(node);
    DONE;
  }
  count("event records");
  event->captured = nullptr;
  Node node{Node::RECORD, "record"};
  node.event = event;
  node.target = ++event->recorded;
  RETURN(enqueue(stream, std::move(node)));
}
API(cudaEventRecord)(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
API(cudaStreamWaitEvent)(cudaStream_t handle, cudaEvent_t awaited, unsigned flags) {
  Lock lock(mutex);
  auto* event = (Event*)awaited;
  auto* stream = stream_of(handle);
  if (stream->capture) {
    if (stream->capture->status != Capture::ACTIVE) RETURN(CAPTURE_INVALIDATED);
    if (!(flags & cudaEventWaitExternal)) {
      if (event->captured == stream->capture) DONE;
      stream->capture->status = Capture::INVALID;
      violation("a wait in a capture for an event from outside, not external");
      RETURN(CAPTURE_ISOLATION);
    }
    auto node = std::make_shared<Node>(Node{Node::WAIT, "wait"});
    node->event = event;
    stream->capture->graph->nodes.push_back(node);
    DONE;
  }
  if (event->captured) {  // the stream joins the capture
    stream->capture = event->captured;
    DONE;
  }
  if (!event->recorded) {
    count("waits for an event never recorded");
    DONE;
  }
  count("event waits");
  Node node{Node::WAIT, "wait"};
  node.event = event;
  node.target = event->recorded;
  RETURN(enqueue(stream, std::move(node)));
}
API(cudaEventQuery)(cudaEvent_t handle) {
  REFUSED_IN_CAPTURE(cudaEventQuery);
  FAILED_DEVICE;
  auto* event = (Event*)handle;
  uint64_t target = event->recorded;
  return comes_true([=] { return event->happened >= target; }) ? cudaSuccess : cudaErrorNotReady;
}
API(cudaEventSynchronize)(cudaEvent_t handle) {
  COUNTED(cudaEventSynchronize);
  REFUSED_IN_CAPTURE(cudaEventSynchronize);
  FAILED_DEVICE;
  RETURN(synchronize((Event*)handle));
}
API(cudaEventElapsedTime)(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  Lock lock(mutex);
  auto *from = (Event*)begin, *to = (Event*)end;
  bool timed = !((from->flags | to->flags) & cudaEventDisableTiming);
  if (!timed || !from->recorded || !to->recorded) RETURN(INVALID_HANDLE);
  if (from->happened < from->recorded || to->happened < to->recorded) RETURN(NOT_READY);
  *ms = (float)(to->at_ms - from->at_ms);
  DONE;
}
API(cudaLaunchHostFunc)(cudaStream_t stream, cudaHostFn_t run, void* data) {
  RETURN(launch("host function", stream_of(stream), [run, data] { run(data); }));
}
API(cudaStreamAddCallback)(cudaStream_t stream, cudaStreamCallback_t run, void* data, unsigned) {
  RETURN(launch("callback", stream_of(stream), [=] { run(stream, cudaSuccess, data); }));
}

// --- graphs

API(cudaGraphInstantiateWithFlags)(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  FAILED_DEVICE;
  Lock lock(mutex);
  if (!take(device().graph_bytes)) RETURN(OUT_OF_MEMORY);
  *made = (cudaGraphExec_t) new Graph(*(Graph*)graph);
  device().live_executables++;
  DONE;
}
API(cudaGraphInstantiate)(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, graph, flags);
}
// A wait takes the record of the moment of the launch, also where the graph makes a later one.
API(cudaGraphLaunch)(cudaGraphExec_t executable, cudaStream_t handle) {
  COUNTED(cudaGraphLaunch);
  Lock lock(mutex);
  auto* stream = stream_of(handle);
  if (stream->capture) violation("a graph is launched in a capture");
  for (auto& captured : ((Graph*)executable)->nodes) {
    Node node = *captured;
    if (node.kind == Node::RECORD) node.target = ++node.event->recorded;
    if (node.kind == Node::WAIT) {
      if (!node.event->recorded) count("waits for an event never recorded");
      node.target = node.event->recorded;
    }
    if (int error = enqueue(stream, std::move(node))) RETURN(error);
  }
  DONE;
}
API(cudaGraphExecDestroy)(cudaGraphExec_t executable) {
  Lock lock(mutex);
  delete (Graph*)executable;
  device().live_executables--;
  give_back(device().graph_bytes);
  DONE;
}
API(cudaGraphDestroy)(cudaGraph_t graph) {
  Lock lock(mutex);
  delete (Graph*)graph;
  device().live_graphs--;
  DONE;
}
API(cudaGraphGetNodes)(cudaGraph_t graph, cudaGraphNode_t* found, size_t* size) {
  auto& nodes = ((Graph*)graph)->nodes;
  for (size_t i = 0; found && i < *size && i < nodes.size(); i++) found[i] = (cudaGraphNode_t)nodes[i].get();
  *size = nodes.size();
  DONE;
}
API(cudaUserObjectCreate)(cudaUserObject_t* made, void*, cudaHostFn_t, unsigned, unsigned) { *made = (cudaUserObject_t)1; DONE; }
API(cudaUserObjectRelease)(cudaUserObject_t, unsigned) { DONE; }
API(cudaGraphRetainUserObject)(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { DONE; }

// --- kernels of torch, which do nothing

struct LaunchConfiguration { dim3 grid, block; size_t shared_bytes; void* stream; };
static thread_local std::vector<LaunchConfiguration> configurations;
static std::map<const void*, std::string>& kernel_names() {
  static auto* names = new std::map<const void*, std::string>;
  return *names;
}
extern "C" void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
extern "C" void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" void __cudaUnregisterFatBinary(void**) {}
extern "C" void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernel_names()[host] = name;
}
extern "C" void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
extern "C" unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}
extern "C" cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  auto last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *(void**)stream = last.stream;
  DONE;
}
extern "C" cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) { *kernel = (cudaKernel_t)function; DONE; }
static cudaError_t launch_nothing(const void* function, dim3 grid, dim3 block, cudaStream_t stream) {
  auto found = kernel_names().find(function);
  std::string name = found == kernel_names().end() ? "?" : found->second.substr(0, 100);
  size_t threads = (size_t)block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || !threads || threads > 1024) {
    violation("grid or block out of range: " + name);
    RETURN(INVALID_CONFIGURATION);
  }
  count("kernels of torch");
  RETURN(launch(name, stream_of(stream)));
}
extern "C" cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch_nothing((const void*)kernel, grid, block, stream);
}
API(cudaLaunchKernel)(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch_nothing(function, grid, block, stream);
}
API(cudaLaunchKernelExC)(const cudaLaunchConfig_t* how, const void* function, void**) {
  return launch_nothing(function, how->gridDim, how->blockDim, how->stream);
}
API(cudaFuncGetAttributes)(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  found->maxDynamicSharedSizeBytes = 49152;
  DONE;
}
API(cudaFuncSetAttribute)(const void*, cudaFuncAttribute, int) { DONE; }
API(cudaKernelSetAttributeForDevice)(cudaKernel_t, cudaFuncAttribute, int, int) { DONE; }
API(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)(int* blocks, const void*, int, size_t, unsigned) { *blocks = 2; DONE; }
API(cudaOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, const void*, int, size_t) { *blocks = 2; DONE; }
API(cudaGetDriverEntryPointByVersion)(const char* name, void** found, unsigned, unsigned long long,
                                      cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  static auto look_up = driver ? (void* (*)(const char*))dlsym(driver, "fake_cuda_driver_symbol") : nullptr;
  *found = look_up ? look_up(name) : nullptr;
  if (result) *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*found) fake_missing(name);
  DONE;
}
