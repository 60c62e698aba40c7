#include "distributed/mpi_plan.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "distributed/mpi_check.h"
#include "kernels/cpu/convert.h"

namespace mixtape::distributed {
namespace {

std::atomic<std::int64_t> piece_bytes{std::int64_t{1} << 30};
/// Reductions go in shorter pieces: MPI's and our own buffers then stay in the cache.
constexpr std::int64_t kReducedBytes = 4 << 20;

const char* at(const void* data, std::int64_t bytes) {
  return static_cast<const char*>(data) + bytes;
}
char* at(void* data, std::int64_t bytes) { return static_cast<char*>(data) + bytes; }

MPI_Datatype mpi_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return MPI_FLOAT;
    case Dtype::f64: return MPI_DOUBLE;
    case Dtype::i64: return MPI_INT64_T;
    case Dtype::i32: return MPI_INT32_T;
    case Dtype::u8:
    case Dtype::b8: return MPI_UINT8_T;
    default: MT_THROW("MPI: has no type for ", dtype);
  }
}

MPI_Op mpi_op(ReduceOp op, Dtype dtype) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg: return dtype == Dtype::b8 ? MPI_MAX : MPI_SUM;  // of bool: or
    case ReduceOp::min: return MPI_MIN;
    case ReduceOp::max: return MPI_MAX;
  }
  MT_THROW("MPI: invalid ReduceOp ", static_cast<int>(op));
}

/// `count` elements of a buffer that belongs to several ranks: the ranks' pieces lie `stride`
/// elements apart.
class StridedType {
 public:
  StridedType(std::int64_t count, std::int64_t stride, std::size_t size) {
    const auto bytes = static_cast<std::int64_t>(size);
    MPI_Datatype piece = MPI_DATATYPE_NULL;
    MT_MPI_CHECK(MPI_Type_contiguous(static_cast<int>(count * bytes), MPI_BYTE, &piece));
    const int error = MPI_Type_create_resized(piece, 0, stride * bytes, &type_);
    MPI_Type_free(&piece);
    MT_MPI_CHECK(error);
    MT_MPI_CHECK(MPI_Type_commit(&type_));
  }
  ~StridedType() {
    if (type_ != MPI_DATATYPE_NULL) MPI_Type_free(&type_);  // MPI keeps it for calls under way
  }
  StridedType(const StridedType&) = delete;
  StridedType& operator=(const StridedType&) = delete;
  operator MPI_Datatype() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

std::int64_t bytes_of(Dtype dtype) { return static_cast<std::int64_t>(size_of(dtype)); }

/// Elements [begin, begin + count) of what one rank holds.
struct Piece {
  std::int64_t begin = 0, count = 0;
};

/// Cuts a rank's `numel` elements, of `bytes_per_element` in a call, into pieces.
class PiecewisePlan : public MpiPlan {
 public:
  PiecewisePlan(const Collective& c, const MpiGroup& group, const void* in, void* out,
                std::int64_t numel, std::int64_t bytes_per_element)
      : c_(c),
        group_(group),
        in_(in),
        out_(out),
        numel_(numel),
        size_(bytes_of(c.in.dtype())),
        per_call_(std::max<std::int64_t>(1, mpi_piece_bytes() / bytes_per_element)) {}

  bool post(MPI_Request& request) final {
    if (next_ >= numel_) return false;
    piece_ = {next_, std::min(per_call_, numel_ - next_)};
    next_ += piece_.count;
    post_piece(piece_, request);
    return true;
  }
  void complete(const MPI_Status& status) final { complete_piece(piece_, status); }

 protected:
  virtual void post_piece(Piece piece, MPI_Request& request) = 0;
  virtual void complete_piece(Piece, const MPI_Status&) {}
  Dtype dtype() const { return c_.in.dtype(); }

  Collective c_;
  MpiGroup group_;
  const void* in_;
  void* out_;
  std::int64_t numel_, size_, per_call_;

 private:
  Piece piece_;
  std::int64_t next_ = 0;
};

/// all_reduce, reduce and reduce_scatter on values of the arithmetic type A in a buffer of their
/// own or in the tensor itself.
template <class A>
void divide(A* values, std::int64_t n, int by) {
  const A divisor = static_cast<A>(by);
  for (std::int64_t i = 0; i < n; ++i) values[i] /= divisor;
}
void divide(Dtype dtype, void* values, std::int64_t n, int by) {
  if (dtype == Dtype::f32)
    divide(static_cast<float*>(values), n, by);
  else
    divide(static_cast<double*>(values), n, by);
}

/// all_reduce and reduce, in place.
class ReducePlan final : public PiecewisePlan {
 public:
  ReducePlan(const Collective& c, const MpiGroup& group, const void* in, void* out)
      : PiecewisePlan(c, group, in, out, c.in.numel(), bytes_of(c.in.dtype())) {
    per_call_ = std::min(per_call_, kReducedBytes / size_);
  }

 protected:
  void post_piece(Piece piece, MPI_Request& request) override {
    void* data = at(out_, piece.begin * size_);
    const int count = static_cast<int>(piece.count);
    const MPI_Datatype type = mpi_type(dtype());
    const MPI_Op op = mpi_op(c_.op, dtype());
    if (c_.kind == CollectiveKind::all_reduce) {
      MT_MPI_CHECK(MPI_Iallreduce(MPI_IN_PLACE, data, count, type, op, group_.comm, &request));
    } else {
      const bool root = group_.rank == c_.peer;
      MT_MPI_CHECK(MPI_Ireduce(root ? MPI_IN_PLACE : data, root ? data : nullptr, count, type, op,
                               c_.peer, group_.comm, &request));
    }
  }
  void complete_piece(Piece piece, const MPI_Status&) override {
    const bool here = c_.kind == CollectiveKind::all_reduce || group_.rank == c_.peer;
    if (c_.op == ReduceOp::avg && here)
      divide(dtype(), at(out_, piece.begin * size_), piece.count, group_.size);
  }
};

/// Reductions of 16-bit values, through float32. For avg each value is divided before it is added.
class ConvertedReducePlan final : public PiecewisePlan {
 public:
  ConvertedReducePlan(const Collective& c, const MpiGroup& group, const void* in, void* out)
      : PiecewisePlan(c, group, in, out, c.in.numel(), sizeof(float)) {
    per_call_ = std::min<std::int64_t>(per_call_, kReducedBytes / sizeof(float));
    buffer_.resize(static_cast<std::size_t>(std::min(per_call_, numel_)));
  }

 protected:
  void post_piece(Piece piece, MPI_Request& request) override {
    kernels::cpu::load_elements(dtype(), at(in_, piece.begin * size_), buffer_.data(), piece.count);
    if (c_.op == ReduceOp::avg) divide(buffer_.data(), piece.count, group_.size);
    const int count = static_cast<int>(piece.count);
    const MPI_Op op = mpi_op(c_.op, dtype());
    if (c_.kind == CollectiveKind::all_reduce) {
      MT_MPI_CHECK(MPI_Iallreduce(MPI_IN_PLACE, buffer_.data(), count, MPI_FLOAT, op, group_.comm,
                                  &request));
    } else {
      const bool root = group_.rank == c_.peer;
      MT_MPI_CHECK(MPI_Ireduce(root ? MPI_IN_PLACE : buffer_.data(),
                               root ? buffer_.data() : nullptr, count, MPI_FLOAT, op, c_.peer,
                               group_.comm, &request));
    }
  }
  void complete_piece(Piece piece, const MPI_Status&) override {
    if (c_.kind == CollectiveKind::reduce && group_.rank != c_.peer) return;
    kernels::cpu::store_elements(dtype(), at(out_, piece.begin * size_), buffer_.data(),
                                 piece.count);
  }

 private:
  std::vector<float> buffer_;
};

/// The dtype in which MPI adds.
Dtype packed_dtype(Dtype dtype) { return is_low_precision(dtype) ? Dtype::f32 : dtype; }

/// Ranks' pieces are packed side by side: MPI reduces blocks that touch.
class ReduceScatterPlan final : public PiecewisePlan {
 public:
  ReduceScatterPlan(const Collective& c, const MpiGroup& group, const void* in, void* out)
      : PiecewisePlan(c, group, in, out, c.out.numel(),
                      group.size * bytes_of(packed_dtype(c.in.dtype()))),
        packed_(packed_dtype(c.in.dtype())),
        packed_size_(bytes_of(packed_)) {
    const std::int64_t bytes = group.size * packed_size_;
    per_call_ = std::min(per_call_, std::max<std::int64_t>(1, kReducedBytes / bytes));
    const std::int64_t count = std::min(per_call_, numel_);
    buffer_.resize(static_cast<std::size_t>(count * bytes));
    result_.resize(static_cast<std::size_t>(count * packed_size_));
  }

 protected:
  void post_piece(Piece piece, MPI_Request& request) override {
    for (int r = 0; r < group_.size; ++r) {
      const void* from = at(in_, (r * numel_ + piece.begin) * size_);
      char* to = buffer_.data() + r * piece.count * packed_size_;
      if (packed_ == dtype())
        std::copy_n(static_cast<const char*>(from), piece.count * size_, to);
      else
        convert(from, reinterpret_cast<float*>(to), piece.count);
    }
    MT_MPI_CHECK(MPI_Ireduce_scatter_block(buffer_.data(), result_.data(),
                                           static_cast<int>(piece.count), mpi_type(packed_),
                                           mpi_op(c_.op, dtype()), group_.comm, &request));
  }
  void complete_piece(Piece piece, const MPI_Status&) override {
    void* to = at(out_, piece.begin * size_);
    if (packed_ != dtype()) {
      kernels::cpu::store_elements(dtype(), to, reinterpret_cast<const float*>(result_.data()),
                                   piece.count);
      return;
    }
    if (c_.op == ReduceOp::avg) divide(dtype(), result_.data(), piece.count, group_.size);
    std::copy_n(result_.data(), piece.count * size_, static_cast<char*>(to));
  }

 private:
  void convert(const void* from, float* to, std::int64_t n) const {
    kernels::cpu::load_elements(dtype(), from, to, n);
    if (c_.op == ReduceOp::avg) divide(to, n, group_.size);
  }

  Dtype packed_;
  std::int64_t packed_size_;
  std::vector<char> buffer_, result_;
};

/// Collectives and messages that move bytes.
class MovePlan final : public PiecewisePlan {
 public:
  MovePlan(const Collective& c, const MpiGroup& group, const void* in, void* out,
           std::int64_t numel)
      : PiecewisePlan(c, group, in, out, numel, bytes_of(c.in.dtype())) {}

 protected:
  void post_piece(Piece piece, MPI_Request& request) override {
    const std::int64_t offset = piece.begin * size_;
    const int bytes = static_cast<int>(piece.count * size_);
    switch (c_.kind) {
      case CollectiveKind::broadcast:
        MT_MPI_CHECK(MPI_Ibcast(at(out_, offset), bytes, MPI_BYTE, c_.peer, group_.comm, &request));
        return;
      case CollectiveKind::send:
        MT_MPI_CHECK(
            MPI_Isend(at(in_, offset), bytes, MPI_BYTE, c_.peer, kTag, group_.comm, &request));
        return;
      case CollectiveKind::recv:
        MT_MPI_CHECK(
            MPI_Irecv(at(out_, offset), bytes, MPI_BYTE, c_.peer, kTag, group_.comm, &request));
        return;
      case CollectiveKind::all_gather: {
        const bool in_place = in_ == at(out_, group_.rank * numel_ * size_);
        const StridedType part(piece.count, numel_, static_cast<std::size_t>(size_));
        MT_MPI_CHECK(MPI_Iallgather(in_place ? MPI_IN_PLACE : at(in_, offset), bytes, MPI_BYTE,
                                    at(out_, offset), 1, part, group_.comm, &request));
        return;
      }
      default: {
        const StridedType part(piece.count, numel_, static_cast<std::size_t>(size_));
        MT_MPI_CHECK(MPI_Ialltoall(at(in_, offset), 1, part, at(out_, offset), 1, part, group_.comm,
                                   &request));
      }
    }
  }
  void complete_piece(Piece piece, const MPI_Status& status) override {
    if (c_.kind != CollectiveKind::recv) return;
    int bytes = 0;
    MT_MPI_CHECK(MPI_Get_count(&status, MPI_BYTE, &bytes));
    MT_CHECK_EQ(bytes, static_cast<int>(piece.count * size_), "recv: bytes from rank ", c_.peer);
  }

 private:
  static constexpr int kTag = 0x6d74;
};

class BarrierPlan final : public MpiPlan {
 public:
  explicit BarrierPlan(const MpiGroup& group) : group_(group) {}
  bool post(MPI_Request& request) override {
    if (posted_) return false;
    posted_ = true;
    MT_MPI_CHECK(MPI_Ibarrier(group_.comm, &request));
    return true;
  }
  void complete(const MPI_Status&) override {}

 private:
  MpiGroup group_;
  bool posted_ = false;
};

}  // namespace

std::int64_t mpi_piece_bytes() { return piece_bytes; }

void set_mpi_piece_bytes(std::int64_t bytes) {
  MT_CHECK(bytes >= 1 && bytes <= (std::int64_t{1} << 30),
           "set_mpi_piece_bytes: expected 1 to 2^30, got ", bytes);
  piece_bytes = bytes;
}

std::unique_ptr<MpiPlan> make_mpi_plan(const Collective& c, const MpiGroup& group, const void* in,
                                       void* out) {
  switch (c.kind) {
    case CollectiveKind::barrier: return std::make_unique<BarrierPlan>(group);
    case CollectiveKind::all_reduce:
    case CollectiveKind::reduce:
      if (is_low_precision(c.in.dtype()))
        return std::make_unique<ConvertedReducePlan>(c, group, in, out);
      return std::make_unique<ReducePlan>(c, group, in, out);
    case CollectiveKind::reduce_scatter:
      return std::make_unique<ReduceScatterPlan>(c, group, in, out);
    case CollectiveKind::all_to_all:
      return std::make_unique<MovePlan>(c, group, in, out, c.in.numel() / group.size);
    default: return std::make_unique<MovePlan>(c, group, in, out, c.in.numel());
  }
}

}  // namespace mixtape::distributed
