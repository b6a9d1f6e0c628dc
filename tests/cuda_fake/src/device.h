// A CUDA device that is host memory, for finding out what a program asks of the driver.
//
// It keeps CUDA's rules of streams, events and captures, counts every call, and notes calls that
// break a rule as violations. It says nothing about speed or about the numerics of a GPU.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace fake {

enum Error {  // cudaError and CUresult have the same numbers for these
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, INVALID_DEVICE = 101,
  INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
  ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, LAUNCH_FAILURE = 719, NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905,
};

struct Capture;

// `recorded` counts records that were enqueued, `happened` those that the device has come to.
struct Event {
  unsigned flags;
  uint64_t recorded = 0, happened = 0;
  double at_ms = 0;
  Capture* captured = nullptr;  // a record of the latest capture, not external
};

// What a stream has yet to do, or a graph does when it is launched.
struct Node {
  enum Kind { WORK, RECORD, WAIT } kind;
  std::string name;
  std::function<void()> run;
  Event* event = nullptr;
  uint64_t target = 0;  // the record of `event` that is made or waited for
};

struct Graph { std::vector<std::shared_ptr<Node>> nodes; };

struct Capture {
  enum Status { ACTIVE = 1, INVALID = 2 };
  Graph* graph;
  int mode;
  std::thread::id thread;
  int status;
  uint64_t id;
};

struct Stream {
  uint64_t id;
  int priority;
  std::deque<std::shared_ptr<Node>> queue;
  Capture* capture = nullptr;
};

enum class Memory : char { DEVICE, HOST_ALLOCATED, HOST_REGISTERED };
struct Range { size_t size; Memory memory; };

// A recursive mutex that can be let go whole, while a kernel runs.
class Mutex {
 public:
  void lock();
  void unlock();
  int let_go();
  void take_back(int depth);

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};
  int depth_ = 0;
};
extern Mutex mutex;
using Lock = std::unique_lock<Mutex>;

struct Device {
  size_t total, context, others, graph_bytes;
  bool late;  // a stream does nothing until somebody waits for it, then in a random order
  uint64_t random;
  size_t used = 0, peak = 0, pinned = 0;
  bool has_context = false;
  std::map<uintptr_t, Range> ranges;
  std::vector<std::unique_ptr<Stream>> streams;
  Stream* legacy_stream = nullptr;
  std::vector<Capture*> captures;
  uint64_t next_id = 1, live_events = 0, live_graphs = 0, live_executables = 0;
  // Failures on demand: after so many calls (-1 never), and the error of every later call.
  long allocations_until_failure = -1, registrations_until_failure = -1;
  int failed = 0;
  bool running = false;
  std::thread::id runner;
  std::string phase = "start";
  std::map<std::string, std::map<std::string, uint64_t>> counts;  // by phase and name
  std::map<std::string, uint64_t> violations, missing;
  size_t in_use() const { return used + others + (has_context ? context : 0); }
};
Device& device();

// Memory. `take` is false where the device has no more.
bool take(size_t size);
void give_back(size_t size);
void* allocate(size_t size);
int release(void* pointer);
void add_range(void* start, size_t size, Memory memory);
Range* range_at(const void* pointer, const void** start = nullptr);
bool on_device(const void* pointer);

// Streams. These return an error.
Stream* stream_of(void* handle);
int enqueue(Stream* stream, Node node);
int launch(const std::string& name, Stream* stream, std::function<void()> run = nullptr);
int copy(void* to, const void* from, size_t size, Stream* stream, const char* name);
int run_until(Lock& lock, const std::function<bool()>& done);
int synchronize(Stream* stream);
int synchronize(Event* event);
int synchronize_all();

// What is told.
void count(const std::string& name);
void violation(const std::string& what);
int refused_in_capture(const char* call);  // an error where a capture under way forbids the call
int remember(int error);                   // as the thread's last error
int& last_error();
int& capture_mode();                       // of this thread
int attribute(int number);                 // of the device

}  // namespace fake
