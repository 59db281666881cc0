// TPipe, TQue, TBuf: memory of a core, and the queues that order its pipes.
#pragma once
#include "deletion.h"
#include "instruction.h"

namespace ascendc_host {

constexpr Memory memory_of(AscendC::TPosition position) {
    switch (position) {
        case AscendC::TPosition::A1:
        case AscendC::TPosition::B1: return Memory::kL1;
        case AscendC::TPosition::A2: return Memory::kL0a;
        case AscendC::TPosition::B2: return Memory::kL0b;
        case AscendC::TPosition::CO1: return Memory::kL0c;
        default: return Memory::kUb;
    }
}

// Events of a queue: filled (EnQue to DeQue) and emptied (FreeTensor to AllocTensor).
struct QueueEvents {
    AscendC::HardEvent filled, emptied;
};

constexpr QueueEvents queue_events(AscendC::TPosition position) {
    using AscendC::HardEvent;
    switch (position) {
        case AscendC::TPosition::VECIN: return {HardEvent::MTE2_V, HardEvent::V_MTE2};
        case AscendC::TPosition::VECOUT: return {HardEvent::V_MTE3, HardEvent::MTE3_V};
        case AscendC::TPosition::A1:
        case AscendC::TPosition::B1: return {HardEvent::MTE2_MTE1, HardEvent::MTE1_MTE2};
        case AscendC::TPosition::A2:
        case AscendC::TPosition::B2: return {HardEvent::MTE1_M, HardEvent::M_MTE1};
        case AscendC::TPosition::CO1: return {HardEvent::M_FIX, HardEvent::FIX_M};
        default: return {HardEvent::MAX, HardEvent::MAX};
    }
}

void start_pipe(Site site);
Buffer* init_buffers(AscendC::TPosition position, Memory memory, BufferState state, int count, uint32_t bytes, Site site);
int fetch_event_id(AscendC::HardEvent event, Site site);
// Steps of a queue on one buffer; they check its state and keep the events of the checked flavour.
void step_alloc(Buffer& buffer, QueueEvents events, Site site);
void step_enque(Buffer& buffer, QueueEvents events, Site site);
void step_deque(Buffer& buffer, QueueEvents events, Site site);
void step_free(Buffer& buffer, QueueEvents events, Site site);

}  // namespace ascendc_host

namespace AscendC {

template <TPosition position, int32_t depth>
class TQue {
    static_assert(position != TPosition::GM && position != TPosition::VECCALC, "TQue: this position is not modelled; use TBuf for VECCALC");
    static_assert(depth >= 1 && depth <= ascendc_host::kEventIds, "TQue: depth must be between 1 and 8");

 public:
    template <typename T>
    LocalTensor<T> AllocTensor(ascendc_host::Site site = ascendc_host::Site::here()) {
        if (ascendc_host::left_out("AllocTensor", site)) return LocalTensor<T>();
        for (int tried = 0; tried < count_; ++tried) {
            ascendc_host::Buffer& buffer = buffers_[next_];
            next_ = (next_ + 1) % count_;
            if (buffer.state != ascendc_host::BufferState::kFree) continue;
            ascendc_host::step_alloc(buffer, kEvents, site);
            return tensor_of<T>(buffer);
        }
        ascendc_host::fail("AllocTensor", site, "none of the %d buffers of the queue is free: FreeTensor or InitBuffer is missing", count_);
    }

    template <typename T>
    bool EnQue(const LocalTensor<T>& tensor, ascendc_host::Site site = ascendc_host::Site::here()) {
        if (ascendc_host::left_out("EnQue", site)) return true;
        require_own("EnQue", tensor.host_buffer(), site);
        if (queued_ == depth) ascendc_host::fail("EnQue", site, "the queue holds %d tensors, its depth: DeQue is missing", depth);
        ascendc_host::step_enque(*tensor.host_buffer(), kEvents, site);
        queue_[(head_ + queued_++) % depth] = tensor.host_buffer();
        return true;
    }

    template <typename T>
    LocalTensor<T> DeQue(ascendc_host::Site site = ascendc_host::Site::here()) {
        if (ascendc_host::left_out("DeQue", site)) return queued_ ? tensor_of<T>(*queue_[head_]) : LocalTensor<T>();
        if (queued_ == 0) ascendc_host::fail("DeQue", site, "the queue is empty: EnQue is missing");
        ascendc_host::Buffer& buffer = *queue_[head_];
        head_ = (head_ + 1) % depth;
        --queued_;
        ascendc_host::step_deque(buffer, kEvents, site);
        return tensor_of<T>(buffer);
    }

    template <typename T>
    void FreeTensor(LocalTensor<T>& tensor, ascendc_host::Site site = ascendc_host::Site::here()) {
        if (ascendc_host::left_out("FreeTensor", site)) return;
        require_own("FreeTensor", tensor.host_buffer(), site);
        ascendc_host::step_free(*tensor.host_buffer(), kEvents, site);
    }

 private:
    friend class TPipe;
    static constexpr TPosition kPosition = position;
    static constexpr ascendc_host::QueueEvents kEvents = ascendc_host::queue_events(position);
    ascendc_host::Buffer* buffers_ = nullptr;
    ascendc_host::Buffer* queue_[depth] = {};
    int count_ = 0, next_ = 0, head_ = 0, queued_ = 0;

    void require_own(const char* function, const ascendc_host::Buffer* buffer, ascendc_host::Site site) const {
        if (buffer == nullptr) ascendc_host::fail(function, site, "the tensor was never allocated");
        if (buffer < buffers_ || buffer >= buffers_ + count_) ascendc_host::fail(function, site, "the tensor belongs to another queue");
    }

    template <typename T>
    static LocalTensor<T> tensor_of(ascendc_host::Buffer& buffer) {
        return LocalTensor<T>::host_make(&buffer, reinterpret_cast<T*>(buffer.start), uint32_t(buffer.bytes / sizeof(T)));
    }
};

template <TPosition position = TPosition::VECCALC>
class TBuf {
    static_assert(position != TPosition::GM, "TBuf: this position is not modelled");

 public:
    template <typename T>
    LocalTensor<T> Get(ascendc_host::Site site = ascendc_host::Site::here()) {
        return part<T>("TBuf::Get", 0, bytes() / sizeof(T), site);
    }
    template <typename T>
    LocalTensor<T> Get(uint32_t len, ascendc_host::Site site = ascendc_host::Site::here()) {
        return part<T>("TBuf::Get", 0, len, site);
    }
    template <typename T>
    LocalTensor<T> GetWithOffset(uint32_t size, uint32_t bufOffset, ascendc_host::Site site = ascendc_host::Site::here()) {
        return part<T>("TBuf::GetWithOffset", bufOffset, size, site);
    }

 private:
    friend class TPipe;
    ascendc_host::Buffer* buffer_ = nullptr;

    uint64_t bytes() const { return buffer_ ? buffer_->bytes : 0; }

    template <typename T>
    LocalTensor<T> part(const char* function, uint64_t offset, uint64_t size, ascendc_host::Site site) {
        if (buffer_ == nullptr) ascendc_host::fail(function, site, "InitBuffer was not called for the buffer");
        if (offset + size * sizeof(T) > bytes())
            ascendc_host::fail(function, site, "bytes [%llu, %llu) are outside a buffer of %u bytes", (unsigned long long)offset,
                               (unsigned long long)(offset + size * sizeof(T)), buffer_->bytes);
        return LocalTensor<T>::host_make(buffer_, reinterpret_cast<T*>(buffer_->start + offset), uint32_t(size));
    }
};

class TPipe {
 public:
    TPipe(ascendc_host::Site site = ascendc_host::Site::here()) { ascendc_host::start_pipe(site); }

    template <TPosition position, int32_t depth>
    bool InitBuffer(TQue<position, depth>& que, uint8_t num, uint32_t len, ascendc_host::Site site = ascendc_host::Site::here()) {
        que.buffers_ = ascendc_host::init_buffers(position, ascendc_host::memory_of(position), ascendc_host::BufferState::kFree, num, len, site);
        que.count_ = num;
        return true;
    }

    template <TPosition position>
    bool InitBuffer(TBuf<position>& buf, uint32_t len, ascendc_host::Site site = ascendc_host::Site::here()) {
        buf.buffer_ = ascendc_host::init_buffers(position, ascendc_host::memory_of(position), ascendc_host::BufferState::kOpen, 1, len, site);
        return true;
    }

    TEventID FetchEventID(HardEvent event, ascendc_host::Site site = ascendc_host::Site::here()) {
        return TEventID(ascendc_host::fetch_event_id(event, site));
    }
};

}  // namespace AscendC
