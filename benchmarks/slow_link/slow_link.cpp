// A process group whose collectives take as long as a given link would take, while no core is busy with waiting.
//
// gloo moves the data. A transfer is complete when a link of `alpha` seconds and `rate` bytes a second would have carried it, behind whatever that link
// still carries. It starts when the last rank has issued it: every rank notes the time of each issue in memory that the ranks share (CLOCK_MONOTONIC is
// one clock for all processes of a machine). One thread a direction sleeps until then; nobody polls.
#include <ATen/core/ivalue.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>
#include <torch/python.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

namespace {

using c10d::OpType;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using Stamp = std::atomic<double>;
static_assert(Stamp::is_always_lock_free, "shared between processes");

double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

void sleep_until(double when) {
  timespec t;
  t.tv_sec = time_t(when);
  t.tv_nsec = long((when - double(t.tv_sec)) * 1e9);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr) == EINTR) {
  }
}

struct Counters {
  std::mutex guard;
  int64_t count = 0;
  double bytes = 0, busy_s = 0, exposed_s = 0, late_s = 0, carried_s = 0;
} counters;

// ---- one transfer ----------------------------------------------------------------------------------------------------------------------------------

struct Transfer : Work {
  Transfer(OpType op, Tensors results, c10::intrusive_ptr<Work> carried, double bytes, bool priced, std::vector<Stamp*> issued)
      : Work(-1, op), results(std::move(results)), carried(std::move(carried)), bytes(bytes), priced(priced), issued(std::move(issued)),
        future(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  bool isCompleted() override {
    std::lock_guard<std::mutex> hold(guard);
    return done;
  }
  bool isSuccess() const override {
    std::lock_guard<std::mutex> hold(guard);
    return done && !error;
  }
  bool wait(std::chrono::milliseconds) override {
    std::unique_lock<std::mutex> hold(guard);
    if (!done) {
      double since = seconds();
      ended.wait(hold, [this] { return done; });
      std::lock_guard<std::mutex> count(counters.guard);
      counters.exposed_s += seconds() - since;
    }
    if (error) std::rethrow_exception(error);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  void end(std::exception_ptr with) {
    {
      std::lock_guard<std::mutex> hold(guard);
      done = true;
      error = with;
      carried.reset();
    }
    ended.notify_all();
    if (with)
      future->setErrorIfNeeded(with);
    else
      future->markCompleted(c10::IValue(results));
  }

  const Tensors results;
  c10::intrusive_ptr<Work> carried;  // gloo's
  const double bytes;                // that this rank sends
  const bool priced;                 // a barrier is not
  const std::vector<Stamp*> issued;  // by every rank that takes part
  const c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  mutable std::mutex guard;
  std::condition_variable ended;
  bool done = false;
  std::exception_ptr error;
};

// ---- one direction of a link -----------------------------------------------------------------------------------------------------------------------

class Direction {
 public:
  std::atomic<double> alpha_s{0}, rate{1e18};

  Direction() { std::thread([this] { serve(); }).detach(); }

  void put(c10::intrusive_ptr<Transfer> t) {
    {
      std::lock_guard<std::mutex> hold(guard_);
      queue_.push_back(std::move(t));
    }
    more_.notify_one();
  }

 private:
  [[noreturn]] void serve() {
    for (;;) {
      auto t = next();
      std::exception_ptr error;
      try {
        t->carried->wait(kNoTimeout);
      } catch (...) {
        error = std::current_exception();
      }
      if (!error && t->priced) take(*t);
      t->end(error);
    }
  }

  c10::intrusive_ptr<Transfer> next() {
    std::unique_lock<std::mutex> hold(guard_);
    more_.wait(hold, [this] { return !queue_.empty(); });
    auto t = std::move(queue_.front());
    queue_.pop_front();
    return t;
  }

  void take(const Transfer& t) {
    double last = 0;
    for (auto* stamp : t.issued) last = std::max(last, stamp->load());
    double asked = alpha_s + t.bytes / rate, start = std::max(last, free_at_), end = start + asked, carried = seconds();
    {
      std::lock_guard<std::mutex> count(counters.guard);
      counters.count += 1;
      counters.bytes += t.bytes;
      counters.busy_s += asked;
      counters.late_s += std::max(0.0, carried - end);
      counters.carried_s += carried - last;
    }
    sleep_until(end);  // at once if that is past
    free_at_ = std::max(carried, end);
  }

  std::mutex guard_;
  std::condition_variable more_;
  std::deque<c10::intrusive_ptr<Transfer>> queue_;
  double free_at_ = 0;
};

// Never destroyed: their threads run for as long as the process does.
Direction& direction(const std::string& name) {
  static std::mutex guard;
  static auto& all = *new std::map<std::string, Direction*>;
  std::lock_guard<std::mutex> hold(guard);
  auto& found = all[name];
  if (!found) found = new Direction;
  return *found;
}

// ---- when every rank issued ------------------------------------------------------------------------------------------------------------------------

class Stamps {
 public:
  static constexpr int64_t KEPT = 8192;  // more than are ever under way

  Stamps(const std::string& name, int64_t ranks) : ranks_(ranks), bytes_(sizeof(Stamp) * KEPT * (ranks + ranks * ranks)) {
    int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    bool sized = file >= 0 && ftruncate(file, off_t(bytes_)) == 0;
    void* at = sized ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (file >= 0) close(file);
    TORCH_CHECK(at != MAP_FAILED, "no shared memory of ", bytes_, " bytes under ", name, " (/dev/shm)");
    all_ = static_cast<Stamp*>(at);
  }
  ~Stamps() { munmap(all_, bytes_); }
  Stamps(const Stamps&) = delete;

  std::vector<Stamp*> collective(int64_t n) {
    std::vector<Stamp*> out;
    for (int64_t r = 0; r < ranks_; r++) out.push_back(all_ + (n % KEPT) * ranks_ + r);
    return out;
  }
  Stamp* message(int64_t from, int64_t to, int64_t n) { return all_ + KEPT * ranks_ + (from * ranks_ + to) * KEPT + n % KEPT; }

 private:
  int64_t ranks_;
  size_t bytes_;
  Stamp* all_;
};

double size_of(const Tensors& tensors) {
  double sum = 0;
  for (auto& t : tensors) sum += double(t.nbytes());
  return sum;
}

// ---- the process group's backend -------------------------------------------------------------------------------------------------------------------

// What a rank sends is what the ring algorithms of `autopar.graph.calls.wire_bytes` send.
class SlowLink : public c10d::Backend {
 public:
  SlowLink(c10::intrusive_ptr<Backend> gloo, int rank, int size, const std::string& shared, const std::string& link)
      : Backend(rank, size), gloo_(std::move(gloo)), out_(direction(link + ".out")), in_(direction(link + ".in")), stamps_(shared, size),
        sent_(size), received_(size) {}

  const std::string getBackendName() const override { return "slow"; }
  bool supportsSplitting() const override { return false; }

  c10::intrusive_ptr<Work> broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return collective(OpType::BROADCAST, t, size_of(t), [&] { return gloo_->broadcast(t, o); });
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    auto p = o;
    if (mean(p.reduceOp))  // which gloo does not have
      for (auto& x : t) x.div_(size_);
    return collective(OpType::ALLREDUCE, t, 2 * others() / size_ * size_of(t), [&] { return gloo_->allreduce(t, p); });
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return collective(OpType::ALLREDUCE_COALESCED, t, 2 * others() / size_ * size_of(t), [&] { return gloo_->allreduce_coalesced(t, o); });
  }
  c10::intrusive_ptr<Work> reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return collective(OpType::REDUCE, t, size_of(t), [&] { return gloo_->reduce(t, o); });
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return collective(OpType::ALLGATHER, out[0], others() * size_of(in), [&] { return gloo_->allgather(out, in, o); });
  }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return collective(OpType::_ALLGATHER_BASE, {out}, others() * double(in.nbytes()), [&] { return gloo_->_allgather_base(out, in, o); });
  }
  c10::intrusive_ptr<Work> allgather_coalesced(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return collective(OpType::ALLGATHER_COALESCED, out[0], others() * size_of(in), [&] { return gloo_->allgather_coalesced(out, in, o); });
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto run = [&] { return gloo_->allgather_into_tensor_coalesced(out, in, o); };
    return collective(OpType::COALESCED, out, others() * size_of(in), run);
  }
  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    return collective(OpType::GATHER, in, size_of(in), [&] { return gloo_->gather(out, in, o); });
  }
  c10::intrusive_ptr<Work> scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    return collective(OpType::SCATTER, out, size_of(out), [&] { return gloo_->scatter(out, in, o); });
  }
  c10::intrusive_ptr<Work> reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
    return collective(OpType::REDUCE_SCATTER, out, others() * size_of(out), [&] { return gloo_->reduce_scatter(out, in, o); });
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto p = o;
    auto source = mean(p.reduceOp) ? in / size_ : in;
    auto run = [&] { return gloo_->_reduce_scatter_base(out, source, p); };
    return collective(OpType::_REDUCE_SCATTER_BASE, {out}, others() * double(out.nbytes()), run);
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    auto run = [&] { return gloo_->reduce_scatter_tensor_coalesced(out, in, o); };
    return collective(OpType::COALESCED, out, others() * size_of(out), run);
  }
  c10::intrusive_ptr<Work> alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from, const c10d::AllToAllOptions& o) override {
    double rows = double(std::max<int64_t>(in.dim() ? in.size(0) : 1, 1));
    double kept = from.empty() ? 1.0 / size_ : double(from[rank_]) / rows;
    auto run = [&] { return gloo_->alltoall_base(out, in, to, from, o); };
    return collective(OpType::ALLTOALL_BASE, {out}, (1 - kept) * double(in.nbytes()), run);
  }
  c10::intrusive_ptr<Work> alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    double sent = size_of(in) - double(in[rank_].nbytes());
    return collective(OpType::ALLTOALL, out, sent, [&] { return gloo_->alltoall(out, in, o); });
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& o) override {
    return collective(OpType::BARRIER, {}, 0, [&] { return gloo_->barrier(o); }, false);
  }
  c10::intrusive_ptr<Work> send(Tensors& t, int to, int tag) override {
    auto* stamp = stamps_.message(rank_, to, sent_[to]++);
    stamp->store(seconds());
    return put(out_, c10::make_intrusive<Transfer>(OpType::SEND, t, gloo_->send(t, to, tag), size_of(t), true, std::vector{stamp}));
  }
  c10::intrusive_ptr<Work> recv(Tensors& t, int from, int tag) override {
    auto* stamp = stamps_.message(from, rank_, received_[from]++);
    return put(in_, c10::make_intrusive<Transfer>(OpType::RECV, t, gloo_->recv(t, from, tag), size_of(t), true, std::vector{stamp}));
  }

  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool all) override { gloo_->monitoredBarrier(o, all); }
  void setTimeout(std::chrono::milliseconds t) override { gloo_->setTimeout(t); }

 private:
  double others() const { return size_ - 1.0; }

  static bool mean(c10d::ReduceOp& op) {
    if (op != c10d::ReduceOp::AVG) return false;
    op = c10d::ReduceOp::SUM;
    return true;
  }

  template <class Carry>
  c10::intrusive_ptr<Work> collective(OpType op, Tensors results, double bytes, Carry&& carry, bool priced = true) {
    auto issued = stamps_.collective(collectives_++);
    issued[rank_]->store(seconds());
    return put(out_, c10::make_intrusive<Transfer>(op, std::move(results), carry(), bytes, priced, std::move(issued)));
  }

  static c10::intrusive_ptr<Work> put(Direction& d, c10::intrusive_ptr<Transfer> t) {
    d.put(t);
    return t;
  }

  c10::intrusive_ptr<Backend> gloo_;
  Direction &out_, &in_;
  Stamps stamps_;
  int64_t collectives_ = 0;
  std::vector<int64_t> sent_, received_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "make",
      [](const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size, const std::string& shared, const std::string& link) {
        return c10::static_intrusive_pointer_cast<c10d::Backend>(c10::make_intrusive<SlowLink>(gloo, rank, size, shared, link));
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("forget", [](const std::string& shared) { shm_unlink(shared.c_str()); });
  m.def("configure", [](const std::string& link, double alpha_s, double rate) {
    for (auto end : {".out", ".in"}) {
      direction(link + end).alpha_s = alpha_s;
      direction(link + end).rate = rate;
    }
  });
  m.def("take", [] {
    std::lock_guard<std::mutex> count(counters.guard);
    auto told = std::make_tuple(counters.count, counters.bytes, counters.busy_s, counters.exposed_s, counters.late_s, counters.carried_s);
    counters.count = 0;
    counters.bytes = counters.busy_s = counters.exposed_s = counters.late_s = counters.carried_s = 0;
    return told;
  });
}
