// Memory, streams and captures of the fake device.
#include "device.h"

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

namespace fake {

namespace {
constexpr size_t kPage = 2 << 20;
constexpr size_t kLongestQueue = 4096;

double setting(const char* name, double otherwise) {
  const char* value = getenv(name);
  return value ? atof(value) : otherwise;
}

double now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

Device* make_device() {
  auto* made = new Device;
  made->total = setting("FAKE_CUDA_TOTAL_GIB", 79.18) * (1ull << 30);
  made->context = setting("FAKE_CUDA_CONTEXT_MIB", 550) * (1ull << 20);
  made->others = setting("FAKE_CUDA_OTHERS_MIB", 0) * (1ull << 20);
  made->graph_bytes = setting("FAKE_CUDA_GRAPH_KIB", 64) * 1024;
  made->late = setting("FAKE_CUDA_LATE", 0);
  made->random = setting("FAKE_CUDA_SEED", 1);
  return made;
}

size_t in_pages(size_t size) { return (std::max<size_t>(size, 1) + kPage - 1) & ~(kPage - 1); }
}  // namespace

Mutex mutex;

void Mutex::lock() {
  auto me = std::this_thread::get_id();
  if (owner_.load() == me) {
    depth_++;
    return;
  }
  mutex_.lock();
  owner_ = me;
  depth_ = 1;
}

void Mutex::unlock() {
  if (--depth_ == 0) {
    owner_ = std::thread::id();
    mutex_.unlock();
  }
}

int Mutex::let_go() {
  int depth = depth_;
  depth_ = 0;
  owner_ = std::thread::id();
  mutex_.unlock();
  return depth;
}

void Mutex::take_back(int depth) {
  mutex_.lock();
  owner_ = std::this_thread::get_id();
  depth_ = depth;
}

Device& device() {
  static Device* made = make_device();
  return *made;
}

int& last_error() {
  static thread_local int error = 0;
  return error;
}

int& capture_mode() {
  static thread_local int mode = 0;
  return mode;
}

int remember(int error) {
  if (error) last_error() = error;
  return error;
}

void count(const std::string& name) {
  Lock lock(mutex);
  device().counts[device().phase][name]++;
}

void violation(const std::string& what) {
  Lock lock(mutex);
  if (!device().violations[what]++) fprintf(stderr, "[fake CUDA] violation: %s\n", what.c_str());
}

// --- memory

bool take(size_t size) {
  auto& d = device();
  d.has_context = true;
  if (d.allocations_until_failure >= 0 && d.allocations_until_failure-- == 0) return false;
  if (d.in_use() + size > d.total) return false;
  d.used += size;
  d.peak = std::max(d.peak, d.used);
  return true;
}

void give_back(size_t size) { device().used -= size; }

void add_range(void* start, size_t size, Memory memory) {
  device().ranges[(uintptr_t)start] = {size, memory};
}

Range* range_at(const void* pointer, const void** start) {
  auto& ranges = device().ranges;
  auto found = ranges.upper_bound((uintptr_t)pointer);
  if (found == ranges.begin()) return nullptr;
  --found;
  if ((uintptr_t)pointer >= found->first + std::max<size_t>(found->second.size, 1)) return nullptr;
  if (start) *start = (void*)found->first;
  return &found->second;
}

bool on_device(const void* pointer) {
  auto* range = range_at(pointer);
  return range && range->memory == Memory::DEVICE;
}

void* allocate(size_t size) {
  size_t whole = in_pages(size);
  if (!take(whole)) return nullptr;
  void* mapped = mmap(nullptr, whole + kPage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    give_back(whole);
    return nullptr;
  }
  uintptr_t begin = (uintptr_t)mapped, start = in_pages(begin), end = begin + whole + kPage;
  if (start != begin) munmap(mapped, start - begin);
  if (end > start + whole) munmap((void*)(start + whole), end - start - whole);
  add_range((void*)start, whole, Memory::DEVICE);
  return (void*)start;
}

int release(void* pointer) {
  if (!on_device(pointer)) return INVALID_VALUE;
  size_t size = range_at(pointer)->size;
  device().ranges.erase((uintptr_t)pointer);
  munmap(pointer, size);
  give_back(size);
  return SUCCESS;
}

// --- streams

Stream* stream_of(void* handle) {
  auto& d = device();
  if (!d.legacy_stream) {
    d.streams.emplace_back(new Stream{0, 0});
    d.legacy_stream = d.streams.back().get();
  }
  bool is_default = !handle || handle == (void*)1 || handle == (void*)2;
  return is_default ? d.legacy_stream : (Stream*)handle;
}

namespace {
bool can_run(const Node& node) {
  return node.kind != Node::WAIT || node.event->happened >= node.target;
}

void run_next(Stream* stream) {
  auto node = stream->queue.front();
  stream->queue.pop_front();
  if (node->kind == Node::RECORD) {
    node->event->happened = std::max(node->event->happened, node->target);
    node->event->at_ms = now_ms();
  } else if (node->run) {
    auto& d = device();
    bool before = d.running;
    d.running = true;
    d.runner = std::this_thread::get_id();
    int depth = mutex.let_go();  // Python's kernels take its own lock
    node->run();
    mutex.take_back(depth);
    d.running = before;
  }
}

uint64_t random_number() {  // xorshift64
  auto& x = device().random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x;
}

bool another_thread_runs() {
  return device().running && device().runner != std::this_thread::get_id();
}
}  // namespace

// Everything that is not asked for happens as late as it can.
int run_until(Lock&, const std::function<bool()>& done) {
  while (!done()) {
    if (another_thread_runs()) {
      int depth = mutex.let_go();
      usleep(200);
      mutex.take_back(depth);
      continue;
    }
    std::vector<Stream*> ready;
    for (auto& stream : device().streams)
      if (!stream->queue.empty() && can_run(*stream->queue.front())) ready.push_back(stream.get());
    if (ready.empty()) {
      violation("deadlock: nothing can run");
      return LAUNCH_FAILURE;
    }
    run_next(ready[random_number() % ready.size()]);
  }
  return SUCCESS;
}

int synchronize(Stream* stream) {
  Lock lock(mutex);
  return run_until(lock, [stream] { return stream->queue.empty(); });
}

int synchronize(Event* event) {
  Lock lock(mutex);
  uint64_t target = event->recorded;
  return run_until(lock, [event, target] { return event->happened >= target; });
}

int synchronize_all() {
  Lock lock(mutex);
  return run_until(lock, [] {
    for (auto& stream : device().streams)
      if (!stream->queue.empty()) return false;
    return !another_thread_runs();
  });
}

int enqueue(Stream* stream, Node node) {
  Lock lock(mutex);
  auto& d = device();
  if (d.failed) return remember(d.failed);
  if (stream->capture) {
    if (stream->capture->status != Capture::ACTIVE) return remember(CAPTURE_INVALIDATED);
    stream->capture->graph->nodes.push_back(std::make_shared<Node>(std::move(node)));
    return SUCCESS;
  }
  stream->queue.push_back(std::make_shared<Node>(std::move(node)));
  if (!d.late) return run_until(lock, [stream] { return stream->queue.empty(); });
  if (stream->queue.size() > kLongestQueue)  // then an enqueueing thread waits
    return run_until(lock, [stream] { return stream->queue.size() < kLongestQueue / 2; });
  return SUCCESS;
}

int launch(const std::string& name, Stream* stream, std::function<void()> run) {
  count("launch");
  return enqueue(stream, Node{Node::WORK, name, std::move(run)});
}

// A capture that forbids the call is invalid from then on, as CUDA has it.
int refused_in_capture(const char* call) {
  Lock lock(mutex);
  if (capture_mode() == cudaStreamCaptureModeRelaxed) return SUCCESS;
  bool refused = false;
  for (auto* capture : device().captures) {
    if (capture->status != Capture::ACTIVE) continue;
    bool own = capture->thread == std::this_thread::get_id();
    bool forbids = (own && capture->mode != cudaStreamCaptureModeRelaxed) ||
                   (capture->mode == cudaStreamCaptureModeGlobal &&
                    capture_mode() == cudaStreamCaptureModeGlobal);
    if (forbids) {
      capture->status = Capture::INVALID;
      refused = true;
    }
  }
  if (!refused) return SUCCESS;
  violation(std::string(call) + " during a capture");
  return remember(CAPTURE_UNSUPPORTED);
}

// --- copies

namespace {
bool is_pinned(const void* pointer, size_t size) {
  const void* start;
  auto* range = range_at(pointer, &start);
  return range && range->memory != Memory::DEVICE &&
         (char*)pointer + size <= (char*)start + range->size;
}

// Ranges of the device may follow one another: an expandable segment is mapped in pages.
void require_inside(const void* pointer, size_t size, const char* name) {
  const void* start;
  auto* end = (const char*)pointer + size;
  auto* range = range_at(pointer, &start);
  while (range && (char*)start + range->size < end) {
    auto* next = (char*)start + range->size;
    range = range->memory == Memory::DEVICE ? range_at(next, &start) : nullptr;
    if (!range) violation(std::string(name) + " leaves its allocation");
  }
}
}  // namespace

int copy(void* to, const void* from, size_t size, Stream* stream, const char* name) {
  Lock lock(mutex);
  if (!size) return SUCCESS;
  bool to_device = on_device(to), from_device = on_device(from);
  bool to_pageable = !to_device && !is_pinned(to, size);
  bool from_pageable = !from_device && !is_pinned(from, size);
  std::string kind = to_device && from_device ? "D2D" : to_device ? "H2D" : from_device ? "D2H" : "H2H";
  if (to_device != from_device) kind += to_pageable || from_pageable ? " pageable" : " pinned";
  require_inside(to, size, name);
  require_inside(from, size, name);
  count("copies " + kind);
  device().counts[device().phase]["bytes " + kind] += size;
  if (stream->capture && (to_pageable || from_pageable)) violation("pageable copy in a capture");
  Node node{Node::WORK, kind};
  if (from_pageable && !stream->capture) {  // the driver has taken the bytes when the call returns
    auto held = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + size);
    node.run = [to, held] { memcpy(to, held->data(), held->size()); };
  } else {
    node.run = [=] { memmove(to, from, size); };
  }
  if (int error = enqueue(stream, std::move(node))) return error;
  return to_pageable && from_device && !stream->capture ? synchronize(stream) : SUCCESS;
}

int attribute(int number) {  // cudaDeviceAttr, of an H100
  static const std::map<int, int> values = {
      {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535},
      {8, 49152}, {9, 65536}, {10, 32}, {12, 65536}, {13, 1980000}, {16, 132}, {19, 1}, {31, 1},
      {32, 1}, {33, 1}, {36, 2619000}, {37, 5120}, {38, 52428800}, {39, 2048}, {40, 3}, {41, 1},
      {75, 9}, {76, 0}, {78, 1}, {79, 1}, {80, 1}, {81, 233472}, {82, 65536}, {83, 1}, {89, 1},
      {91, 1}, {92, 1}, {93, 1}, {94, 1}, {95, 1}, {97, 232448}, {98, 1}, {99, 1}, {102, 1},
      {106, 32}, {111, 1024}, {115, 1}, {120, 1}, {122, 1}, {123, 1}, {124, 1}};
  auto found = values.find(number);
  return found == values.end() ? 0 : found->second;
}

}  // namespace fake
