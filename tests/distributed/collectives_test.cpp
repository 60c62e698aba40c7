// Every collective against a computation on one rank, for all dtypes, ops and lengths, also where a
// tensor is cut in pieces (CASES 78, 87), and the errors of bad calls.
#include "engine/grad_mode.h"
#include "tests/distributed/rank_values.h"
#include "tests/support/expect_error.h"
#if defined(MIXTAPE_WITH_MPI)
#include "distributed/mpi_plan.h"
#endif

namespace mixtape::distributed {
namespace {

using testing::expect_close;
using testing::expect_error;
using testing::kAllDtypes;
using testing::rank_values;
using testing::reduce_values;
using testing::tensor_of;
using Values = std::vector<double>;

constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max};
constexpr std::int64_t kLengths[] = {0, 1, 7, 1000};

bool has(ReduceOp op, Dtype dtype) { return op != ReduceOp::avg || is_floating(dtype); }

Values part(const Values& whole, int index, int parts) {
  const auto n = whole.size() / static_cast<std::size_t>(parts);
  const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(n) * index;
  return Values(begin, begin + static_cast<std::ptrdiff_t>(n));
}

/// One run of each collective with n values a rank, or n a part.
class Checker {
 public:
  Checker(Dtype dtype, ReduceOp op, std::int64_t n, unsigned seed)
      : dtype_(dtype), op_(op), n_(n), seed_(seed) {}

  void all() {
    reductions();
    moves();
  }
  void reductions() {
    if (!has(op_, dtype_)) return;
    all_reduce();
    reduce();
    reduce_scatter();
  }
  void moves() {
    broadcast();
    all_gather();
    all_to_all();
  }

 private:
  Tensor tensor(const Values& v) const { return tensor_of(v, dtype_, world_.device()); }
  Values values(int r, std::int64_t n) const { return rank_values(dtype_, n, r, seed_); }
  std::vector<Values> all_values(std::int64_t n) const {
    std::vector<Values> all;
    for (int r = 0; r < size_; ++r) all.push_back(values(r, n));
    return all;
  }

  void all_reduce() {
    const Tensor t = tensor(values(rank_, n_));
    world_.all_reduce(t, op_);
    const auto want = reduce_values(op_, dtype_, all_values(n_));
    expect_close(t.to_vector<double>(), want.value, want.tolerance);
  }
  void reduce() {
    const int root = size_ - 1;
    const Tensor t = tensor(values(rank_, n_));
    world_.reduce(t, root, op_);
    const auto want = reduce_values(op_, dtype_, all_values(n_));
    if (rank_ == root) expect_close(t.to_vector<double>(), want.value, want.tolerance);
  }
  void reduce_scatter() {
    const auto want = reduce_values(op_, dtype_, all_values(n_ * size_));
    const Tensor in = tensor(values(rank_, n_ * size_)), out = tensor(Values(size_of_part()));
    world_.reduce_scatter(out, in, op_);
    expect_close(out.to_vector<double>(), part(want.value, rank_, size_),
                 part(want.tolerance, rank_, size_));
    const Tensor mine = in.slice(0, n_ * rank_, n_ * (rank_ + 1));  // in place
    world_.reduce_scatter(mine, in, op_);
    expect_close(mine.to_vector<double>(), part(want.value, rank_, size_),
                 part(want.tolerance, rank_, size_));
  }
  void broadcast() {
    for (const int root : {0, size_ - 1}) {
      const Tensor t = tensor(values(rank_, n_));
      world_.broadcast(t, root);
      EXPECT_EQ(t.to_vector<double>(), values(root, n_));
    }
  }
  void all_gather() {
    Values want;
    for (const Values& v : all_values(n_)) want.insert(want.end(), v.begin(), v.end());
    const Tensor in = tensor(values(rank_, n_)), out = tensor(Values(want.size()));
    world_.all_gather(out, in);
    EXPECT_EQ(out.to_vector<double>(), want);
    const Tensor whole = tensor(Values(want.size()));  // in place
    const Tensor mine = whole.slice(0, n_ * rank_, n_ * (rank_ + 1));
    {
      const NoGrad no_grad;
      mine.detach().copy_(in);
    }
    world_.all_gather(whole, mine);
    EXPECT_EQ(whole.to_vector<double>(), want);
  }
  void all_to_all() {
    Values want;
    for (const Values& v : all_values(n_ * size_)) {
      const Values p = part(v, rank_, size_);
      want.insert(want.end(), p.begin(), p.end());
    }
    const Tensor in = tensor(values(rank_, n_ * size_)), out = tensor(Values(want.size()));
    world_.all_to_all(out, in);
    EXPECT_EQ(out.to_vector<double>(), want);
  }
  std::size_t size_of_part() const { return static_cast<std::size_t>(n_); }

  Communicator world_ = world();
  int rank_ = world_.rank(), size_ = world_.size();
  Dtype dtype_;
  ReduceOp op_;
  std::int64_t n_;
  unsigned seed_;
};

TEST(Collectives, MatchASerialComputation) {
  for (const Dtype dtype : kAllDtypes)
    for (const std::int64_t n : kLengths) {
      SCOPED_TRACE(::testing::Message() << dtype << " x " << n);
      Checker(dtype, ReduceOp::sum, n, 1).moves();
      for (const ReduceOp op : kOps) {
        SCOPED_TRACE(name_of(op));
        Checker(dtype, op, n, 1).reductions();
      }
    }
}

TEST(Collectives, RandomShapesAndDtypes) {
  std::mt19937 generator(5);  // the same on all ranks
  for (unsigned round = 0; round < 25; ++round) {
    const Dtype dtype = kAllDtypes[generator() % std::size(kAllDtypes)];
    const ReduceOp op = kOps[generator() % std::size(kOps)];
    const std::int64_t n = generator() % 3000;
    SCOPED_TRACE(::testing::Message() << "round " << round << ": " << dtype << " x " << n);
    Checker(dtype, op, n, round).all();
  }
}

#if defined(MIXTAPE_WITH_MPI)
TEST(Collectives, InPieces) {  // CASE 87: what is above MPI's counts goes in pieces
  const std::int64_t before = mpi_piece_bytes();
  for (const std::int64_t bytes : {24, 400}) {
    set_mpi_piece_bytes(bytes);
    for (const Dtype dtype : kAllDtypes) {
      SCOPED_TRACE(::testing::Message() << dtype << " in pieces of " << bytes);
      Checker(dtype, ReduceOp::sum, 37, 2).all();
    }
  }
  set_mpi_piece_bytes(before);
}
#endif

TEST(Collectives, AverageOf16BitsDoesNotOverflow) {  // CASE 78
  Communicator w = world();
  for (const auto& [dtype, value] : {std::pair{Dtype::f16, 40000.0}, std::pair{Dtype::bf16, 3e38},
                                     std::pair{Dtype::f16, 6e-8}}) {
    const double stored = testing::rounded(dtype, value);
    const Tensor t = tensor_of({stored}, dtype, w.device());
    w.all_reduce(t, ReduceOp::avg);
    EXPECT_EQ(t.to_vector<double>()[0], stored) << value;
  }
}

TEST(Collectives, AnyRankOverflowIsEveryRanks) {  // CASE 58: the logical or of found-inf flags
  Communicator w = world();
  const Tensor flag = tensor_of({w.rank() == w.size() - 1 ? 1.0 : 0.0}, Dtype::f32, w.device());
  w.all_reduce(flag, ReduceOp::max);
  EXPECT_EQ(flag.to_vector<double>()[0], 1);
}

TEST(Collectives, SendAndReceiveInOrder) {
  Communicator w = world();
  if (w.size() == 1) GTEST_SKIP() << "one rank";
  const int next = (w.rank() + 1) % w.size(), previous = (w.rank() + w.size() - 1) % w.size();
  for (const Dtype dtype : kAllDtypes) {
    std::vector<Tensor> received;
    std::vector<Work> works;
    for (unsigned k = 0; k < 3; ++k) {
      received.push_back(tensor_of(Values(50), dtype, w.device()));
      works.push_back(w.recv_async(received.back(), previous));
    }
    for (unsigned k = 0; k < 3; ++k)
      works.push_back(
          w.send_async(tensor_of(rank_values(dtype, 50, w.rank(), k), dtype, w.device()), next));
    for (Work& work : works) work.wait();
    for (unsigned k = 0; k < 3; ++k)
      EXPECT_EQ(received[k].to_vector<double>(), rank_values(dtype, 50, previous, k));
  }
}

TEST(Collectives, ManyUnderWayAtOnce) {
  Communicator w = world();
  std::vector<Tensor> tensors;
  std::vector<Work> works;
  for (unsigned k = 0; k < 40; ++k) {
    tensors.push_back(tensor_of(rank_values(Dtype::f32, 500, w.rank(), k), Dtype::f32, w.device()));
    works.push_back(k % 2 ? w.broadcast_async(tensors[k], 0)
                          : w.all_reduce_async(tensors[k], ReduceOp::max));
  }
  for (auto work = works.rbegin(); work != works.rend(); ++work) work->wait();
  for (unsigned k = 0; k < 40; ++k) {
    std::vector<Values> all;
    for (int r = 0; r < w.size(); ++r) all.push_back(rank_values(Dtype::f32, 500, r, k));
    const Values want = k % 2 ? all[0] : reduce_values(ReduceOp::max, Dtype::f32, all).value;
    EXPECT_EQ(tensors[k].to_vector<double>(), want);
    EXPECT_TRUE(works[k].done());
  }
}

TEST(Collectives, ADroppedWorkKeepsItsMemory) {  // CASE 92
  Communicator w = world();
  constexpr std::int64_t kCount = 1 << 16;
  for (int round = 0; round < 20; ++round) {
    { w.all_reduce_async(tensor_of(Values(kCount, 1), Dtype::f32, w.device())); }
    const Tensor b = tensor_of(Values(kCount, 1), Dtype::f32, w.device());
    const Values got = b.to_vector<double>();
    EXPECT_EQ(std::count(got.begin(), got.end(), 1.0), kCount);
  }
  w.barrier();
}

TEST(Collectives, WritesCountAsInPlaceWrites) {
  Communicator w = world();
  const Tensor t = tensor_of({1, 2}, Dtype::f32, w.device());
  const std::uint32_t before = t.version();
  w.all_reduce(t);
  EXPECT_GT(t.version(), before);
}

TEST(Collectives, BadCallsAreErrorsOnEveryRank) {
  Communicator w = world();
  const Tensor t = tensor_of(Values(8), Dtype::f32, {2, 4}, w.device());
  expect_error([&] { w.all_reduce(t.t()); }, "expected t to be contiguous");
  expect_error([&] { w.all_reduce(Tensor()); }, "all_reduce: expected t to be a tensor");
  expect_error([&] { w.broadcast(t, w.size()); }, "broadcast: expected root from 0 to");
  expect_error([&] { w.send(t, w.rank()); }, "send: expected another rank");
  expect_error([&] { w.all_gather(t, tensor_of(Values(5), Dtype::f32, w.device())); },
               "all_gather: expected");
  expect_error([&] { w.reduce_scatter(t, t.to(Dtype::f64)); }, "of one dtype");
  expect_error([&] { w.all_reduce(tensor_of({1}, Dtype::i64, w.device()), ReduceOp::avg); },
               "expected a floating dtype for avg");
  expect_error([&] { w.all_to_all(t, t); }, "overlap");
  Tensor leaf = tensor_of({1, 2}, Dtype::f32, w.device());
  leaf.set_requires_grad();
  expect_error([&] { w.all_reduce(leaf); }, "which is on the tape");
  expect_error([&] { Communicator().barrier(); }, "undefined Communicator");
  w.barrier();  // and all ranks are still in step
}

}  // namespace
}  // namespace mixtape::distributed
