// Convolutions of float32 arrays through oneDNN, as XLA custom calls: forward, and the gradients of input and weight.
//
// Arrays are N x C x features and c_out x C/groups x kernel, row-major, as XLA hands them over. oneDNN computes in orders
// of its own, so operands are brought into these first. The memory for that is a second result of each call: XLA
// allocates it, counts it and uses it again. x, and its gradient, may lie apart: a worker's own block, and what it has of
// its neighbours around that. They meet in oneDNN's order, so that nobody has to join them before.
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "oneapi/dnnl/dnnl.hpp"
#include "xla/ffi/api/ffi.h"

#if DNNL_VERSION_MAJOR < 3
#error "oneDNN 3 or newer is needed"
#endif

namespace {

namespace ffi = xla::ffi;
using dnnl::memory;
using Dims = memory::dims;
using Ints = ffi::Span<const int64_t>;
using Floats = ffi::Buffer<ffi::F32>;
using Bytes = ffi::Buffer<ffi::U8>;

enum Direction : int64_t { FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT };

// In which order activations are in memory while oneDNN computes: its own choice, as they are, or channels last.
enum Order : int64_t { CHOSEN, AS_THEY_ARE, CHANNELS_LAST };

dnnl::engine& engine() {
  static dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

dnnl::stream& stream() {
  thread_local dnnl::stream own(engine());
  return own;
}

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

memory::desc row_major(const Dims& shape) {
  Dims strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
  return memory::desc(shape, memory::data_type::f32, strides);
}

memory::desc activations(const Dims& shape, Order order) {
  using Tag = memory::format_tag;
  static constexpr Tag channels_last[] = {Tag::nwc, Tag::nhwc, Tag::ndhwc};
  if (order == AS_THEY_ARE) return row_major(shape);
  const Tag tag = order == CHANNELS_LAST ? channels_last[shape.size() - 3] : Tag::any;
  return memory::desc(shape, memory::data_type::f32, tag);
}

// How many threads a call uses; oneDNN's OpenMP asks each calling thread.
int threads = 1;

void limit_threads() {
  using Set = void (*)(int);
  static const Set set = reinterpret_cast<Set>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set) set(threads);
}

// What is around a worker's own block of x along dimension `axis`: `low` entries before it, and `high` after it, in an
// array of their own. Along the axes of the sides before this one it is as long as x, along those of later ones as long
// as the block.
struct Side {
  int64_t axis, low, high;
};

// A part of an operand: the array that has it, where it is there, where the primitive wants it, and what brings it there.
struct Part {
  int array = 0;
  memory::desc given, wanted;
  dnnl::reorder reorder;
};

// An operand as the primitive wants it, and the parts that XLA has; one that is not moved is used as it is.
struct Operand {
  int argument = 0;
  memory::desc wanted;
  size_t offset = 0;
  std::vector<Part> parts;
  bool is_moved = false;
};

// The parts of x: the block, which is array 0, and what is before and after it on each side, an array for each.
std::vector<Part> parts_of(const Dims& x, const std::vector<Side>& sides, const memory::desc& wanted) {
  std::vector<Part> parts;
  Dims shape = x, place(x.size(), 0);
  for (const Side& side : sides) shape[side.axis] -= side.low + side.high, place[side.axis] = side.low;
  const auto add = [&](int array, const Dims& given, const Dims& part, const Dims& start, const Dims& to) {
    for (int64_t size : part)
      if (size == 0) return;
    parts.push_back({array, row_major(given).submemory_desc(part, start), wanted.submemory_desc(part, to), {}});
  };
  const Dims first(x.size(), 0);
  add(0, shape, shape, first, place);
  int array = 0;
  for (const auto& [axis, low, high] : sides) {
    const int64_t own = shape[axis];
    Dims given = shape, part = shape, start = first;
    ++array, given[axis] = low + high;
    part[axis] = low, place[axis] = 0;
    add(array, given, part, start, place);
    part[axis] = high, start[axis] = low, place[axis] = low + own;
    add(array, given, part, start, place);
    shape[axis] = low + own + high, place[axis] = 0;  // which those of later sides are as long as
  }
  return parts;
}

// The arrays that XLA has of an operand.
using Arrays = std::vector<void*>;

// Two operands, the result, oneDNN's scratchpad, and where they are in the memory that a call is given.
struct Plan {
  dnnl::primitive primitive;
  std::array<Operand, 3> operands;
  memory::desc scratchpad;
  size_t scratchpad_offset = 0, bytes = 0;

  void add(int i, int argument, const memory::desc& given, const memory::desc& wanted) {
    add(i, argument, given != wanted, {{0, given, wanted, {}}}, wanted);
  }

  void add(int i, int argument, bool is_moved, std::vector<Part> parts, const memory::desc& wanted) {
    Operand& operand = operands[i];
    operand.argument = argument, operand.wanted = wanted, operand.parts = std::move(parts);
    operand.is_moved = is_moved;
    if (!is_moved) return;
    for (Part& part : operand.parts) {
      const memory::desc &from = i == 2 ? part.wanted : part.given, &to = i == 2 ? part.given : part.wanted;
      part.reorder = dnnl::reorder(dnnl::reorder::primitive_desc(engine(), from, engine(), to));
    }
    operand.offset = bytes;
    bytes += aligned(wanted.get_size());
  }

  void add_scratchpad(const memory::desc& wanted) {
    scratchpad = wanted, scratchpad_offset = bytes;
    bytes += aligned(wanted.get_size());
  }

  // `data` has the arrays of each operand: one, or that of the block and those of what is around it.
  void run(const std::array<Arrays, 3>& data, char* own) const {
    std::unordered_map<int, memory> arguments;
    for (int i = 0; i < 3; ++i) {
      const Operand& operand = operands[i];
      void* place = operand.is_moved ? own + operand.offset : data[i][0];
      if (i < 2) move(operand, data[i], place, true);
      arguments.emplace(operand.argument, memory(operand.wanted, engine(), place));
    }
    arguments.emplace(DNNL_ARG_SCRATCHPAD, memory(scratchpad, engine(), own + scratchpad_offset));
    primitive.execute(stream(), arguments);
    move(operands[2], data[2], own + operands[2].offset, false);
    stream().wait();
  }

 private:
  static void move(const Operand& operand, const Arrays& arrays, void* place, bool is_given) {
    if (!operand.is_moved) return;
    for (const Part& part : operand.parts) {
      memory given(part.given, engine(), arrays[part.array]), wanted(part.wanted, engine(), place);
      part.reorder.execute(stream(), is_given ? given : wanted, is_given ? wanted : given);
    }
  }
};

// What is computed: the shapes, and how the kernel lies on x. `dilation` is 1 where taps are neighbours.
struct Problem {
  Direction direction;
  Dims x, weight, y, stride, dilation, low, high;
  int64_t groups;
  Order order;
  std::vector<Side> sides;

  std::vector<int64_t> key() const {
    std::vector<int64_t> all{direction, groups, order, int64_t(sides.size())};
    for (const auto& [axis, low, high] : sides) all.insert(all.end(), {axis, low, high});
    for (const Dims* dims : {&x, &weight, &y, &stride, &dilation, &low, &high})
      all.insert(all.end(), dims->begin(), dims->end());
    return all;
  }
};

// oneDNN's reference loops take hundreds of times as long.
template <class Description>
const Description& fast(const Description& description) {
  if (std::string(description.impl_info_str()).rfind("ref", 0) == 0)
    throw std::runtime_error("oneDNN has nothing but its reference loops for it");
  return description;
}

std::shared_ptr<const Plan> planned(const Problem& problem) {
  Dims kernel = problem.weight, gaps = problem.dilation;
  for (int64_t& gap : gaps) --gap;
  if (problem.groups > 1) {
    kernel[0] /= problem.groups;
    kernel.insert(kernel.begin(), problem.groups);
  }
  const memory::desc x = activations(problem.x, problem.order), y = activations(problem.y, problem.order);
  const memory::desc weight(kernel, memory::data_type::f32, memory::format_tag::any);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const auto direct = dnnl::algorithm::convolution_direct;
  const bool is_forward = problem.direction == FORWARD;
  const dnnl::convolution_forward::primitive_desc forward(
      engine(), is_forward ? dnnl::prop_kind::forward_inference : dnnl::prop_kind::forward_training, direct, x, weight,
      y, problem.stride, gaps, problem.low, problem.high, attributes);
  auto plan = std::make_shared<Plan>();
  const auto add_x = [&](int i, int argument, const memory::desc& wanted) {
    if (problem.sides.empty())
      plan->add(i, argument, row_major(problem.x), wanted);
    else
      plan->add(i, argument, true, parts_of(problem.x, problem.sides, wanted), wanted);
  };
  if (is_forward) {
    plan->primitive = dnnl::convolution_forward(fast(forward));
    add_x(0, DNNL_ARG_SRC, forward.src_desc());
    plan->add(1, DNNL_ARG_WEIGHTS, row_major(kernel), forward.weights_desc());
    plan->add(2, DNNL_ARG_DST, row_major(problem.y), forward.dst_desc());
    plan->add_scratchpad(forward.scratchpad_desc());
  } else if (problem.direction == INPUT_GRADIENT) {
    const dnnl::convolution_backward_data::primitive_desc gradient(
        engine(), direct, x, weight, y, problem.stride, gaps, problem.low, problem.high, forward, attributes);
    plan->primitive = dnnl::convolution_backward_data(fast(gradient));
    plan->add(0, DNNL_ARG_WEIGHTS, row_major(kernel), gradient.weights_desc());
    plan->add(1, DNNL_ARG_DIFF_DST, row_major(problem.y), gradient.diff_dst_desc());
    add_x(2, DNNL_ARG_DIFF_SRC, gradient.diff_src_desc());
    plan->add_scratchpad(gradient.scratchpad_desc());
  } else {
    const dnnl::convolution_backward_weights::primitive_desc gradient(
        engine(), direct, x, weight, y, problem.stride, gaps, problem.low, problem.high, forward, attributes);
    plan->primitive = dnnl::convolution_backward_weights(fast(gradient));
    add_x(0, DNNL_ARG_SRC, gradient.src_desc());
    plan->add(1, DNNL_ARG_DIFF_DST, row_major(problem.y), gradient.diff_dst_desc());
    plan->add(2, DNNL_ARG_DIFF_WEIGHTS, row_major(kernel), gradient.diff_weights_desc());
    plan->add_scratchpad(gradient.scratchpad_desc());
  }
  return plan;
}

// The plans that were used last: each holds compiled code, so their number is bounded.
class Plans {
 public:
  std::shared_ptr<const Plan> operator()(const Problem& problem) {
    auto key = problem.key();
    std::lock_guard<std::mutex> held(lock_);
    if (auto found = places_.find(key); found != places_.end()) {
      used_.splice(used_.begin(), used_, found->second);
      return used_.front().second;
    }
    auto plan = planned(problem);
    used_.emplace_front(key, plan);
    places_[std::move(key)] = used_.begin();
    if (used_.size() > most_) {
      places_.erase(used_.back().first);
      used_.pop_back();
    }
    return plan;
  }

 private:
  using Used = std::list<std::pair<std::vector<int64_t>, std::shared_ptr<const Plan>>>;
  static constexpr size_t most_ = 512;
  std::mutex lock_;
  Used used_;
  std::map<std::vector<int64_t>, Used::iterator> places_;
};

Plans& plans() {
  static Plans all;
  return all;
}

Dims dims(Ints ints) { return Dims(ints.begin(), ints.end()); }

// Computes what `problem` says; `data` has the arrays of the two operands and of the result.
ffi::Error compute(const Problem& problem, const std::array<Arrays, 3>& data, ffi::Result<Bytes> own) {
  try {
    limit_threads();
    const auto plan = plans()(problem);
    if (plan->bytes > own->element_count())
      throw std::runtime_error("this program was compiled on a processor where oneDNN needs less memory");
    plan->run(data, reinterpret_cast<char*>(own->typed_data()));
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("A convolution by oneDNN failed: ") + error.what());
  }
  return ffi::Error::Success();
}

Floats& buffer(Floats& operand) { return operand; }
Floats& buffer(ffi::Result<Floats>& result) { return *result; }

// What XLA hands over of x, or of its gradient: its shape, the sides of the block, and the arrays.
struct Input {
  Dims shape;
  std::vector<Side> sides;
  Arrays arrays;

  // `all` is the block, and then what is around it along each of `axes`, of which `before` entries are before the block.
  template <class Remaining>
  static ffi::ErrorOr<Input> of(const Remaining& all, Ints axes, Ints before) {
    Input input;
    for (size_t i = 0; i < all.size(); ++i) {
      auto found = all.template get<Floats>(i);
      if (!found.has_value()) return ffi::Unexpected(found.error());
      Floats& its = buffer(*found);
      input.arrays.push_back(its.typed_data());
      if (i == 0) {
        input.shape = dims(its.dimensions());
        continue;
      }
      const int64_t axis = axes[i - 1], low = before[i - 1], size = its.dimensions()[axis];
      input.sides.push_back({axis, low, size - low});
      input.shape[axis] += size;
    }
    return input;
  }
};

// Forward, of the weight and x, and the weight's gradient, of the result's and x.
template <Direction direction>
ffi::Error run(Floats other, ffi::RemainingArgs parts, ffi::Result<Floats> result, ffi::Result<Bytes> own, Ints stride,
               Ints dilation, Ints low, Ints high, int64_t groups, int64_t order, Ints axes, Ints before) {
  const auto x = Input::of(parts, axes, before);
  if (!x.has_value()) return x.error();
  const Dims a = dims(other.dimensions()), b = dims(result->dimensions());
  const bool is_forward = direction == FORWARD;
  return compute({direction, x->shape, is_forward ? a : b, is_forward ? b : a, dims(stride), dims(dilation), dims(low),
                  dims(high), groups, Order(order), x->sides},
                 {{x->arrays, {other.typed_data()}, {result->typed_data()}}}, own);
}

// The input's gradient, of the weight and the result's.
ffi::Error run_input_gradient(Floats weight, Floats dy, ffi::Result<Bytes> own, ffi::RemainingRets parts, Ints stride,
                              Ints dilation, Ints low, Ints high, int64_t groups, int64_t order, Ints axes,
                              Ints before) {
  const auto dx = Input::of(parts, axes, before);
  if (!dx.has_value()) return dx.error();
  return compute({INPUT_GRADIENT, dx->shape, dims(weight.dimensions()), dims(dy.dimensions()), dims(stride),
                  dims(dilation), dims(low), dims(high), groups, Order(order), dx->sides},
                 {{{weight.typed_data()}, {dy.typed_data()}, dx->arrays}}, own);
}

// What all calls are told in the same words.
template <class Bound>
auto with_window(Bound&& bound) {
  return std::move(bound)
      .template Attr<Ints>("stride")
      .template Attr<Ints>("dilation")
      .template Attr<Ints>("low")
      .template Attr<Ints>("high")
      .template Attr<int64_t>("groups")
      .template Attr<int64_t>("order")
      .template Attr<Ints>("axes")
      .template Attr<Ints>("before");
}

auto of_x() {
  return with_window(ffi::Ffi::Bind().Arg<Floats>().RemainingArgs().Ret<Floats>().Ret<Bytes>());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(convolution_forward, run<FORWARD>, of_x());
XLA_FFI_DEFINE_HANDLER_SYMBOL(convolution_weight_gradient, run<WEIGHT_GRADIENT>, of_x());
XLA_FFI_DEFINE_HANDLER_SYMBOL(convolution_input_gradient, run_input_gradient,
                              with_window(ffi::Ffi::Bind().Arg<Floats>().Arg<Floats>().Ret<Bytes>().RemainingRets()));

extern "C" {

// What this file was compiled for: DISTDL_JAX_MADE_FOR names its own text and jaxlib.
const char* convolution_made_for() { return DISTDL_JAX_MADE_FOR; }

// oneDNN's version, as loaded: 30200 for 3.2.0.
int64_t convolution_onednn_version() {
  const dnnl_version_t* told = dnnl_version();
  return told->major * 10000 + told->minor * 100 + told->patch;
}

void convolution_set_threads(int64_t count) { threads = int(count); }

// How many bytes a call needs beside its operands and its result; -1 where oneDNN has nothing fast to compute it.
// `all` holds x, weight and y, of `rank` entries each, then stride, dilation, low and high, of two less, and then, where x
// lies apart, the number of sides of the block, and for each its axis, and the entries before the block and after it.
int64_t convolution_bytes_needed(int64_t direction, int64_t order, int64_t groups, int64_t rank, const int64_t* all) {
  Problem problem{Direction(direction), {}, {}, {}, {}, {}, {}, {}, groups, Order(order), {}};
  for (Dims* shape : {&problem.x, &problem.weight, &problem.y}) shape->assign(all, all + rank), all += rank;
  for (Dims* each : {&problem.stride, &problem.dilation, &problem.low, &problem.high})
    each->assign(all, all + rank - 2), all += rank - 2;
  const int64_t sides = *all++;
  for (int64_t i = 0; i < sides; ++i, all += 3) problem.sides.push_back({all[0], all[1], all[2]});
  try {
    limit_threads();
    return int64_t(plans()(problem)->bytes);
  } catch (const std::exception&) {
    return -1;
  }
}
}
