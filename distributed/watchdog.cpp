#include "distributed/watchdog.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace mixtape::distributed {
namespace {

constexpr double kAbortSeconds = 3;       // for ncclCommAbort, which itself can hang
constexpr double kTermSeconds = 0.4;      // after SIGTERM; mpirun sends SIGKILL after a second
constexpr double kLastWordSeconds = 0.2;  // rank 0 stays for this long, for the others to hear it
constexpr double kAnswerSeconds = 2;

MessageWriter start_request(Request kind) {
  MessageWriter message;
  message.u8(static_cast<std::uint8_t>(kind));
  return message;
}

/// In one call, so that lines of several ranks do not mix.
void write_message(const std::string& text) {
  const std::string line = "mixtape: " + text + '\n';
  [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, line.data(), line.size());
}

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

}  // namespace

Watchdog::Watchdog(Options options) : options_(std::move(options)) {
  socket_ = connect_to_store(options_.store, options_.timeout);
  int ends[2];
  MT_CHECK(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, "watchdog: cannot make a pipe");
  wake_read_ = Socket(ends[0]);
  wake_write_ = Socket(ends[1]);
  const MessageWriter attach =
      start_request(Request::attach).i64(options_.rank).text(options_.description);
  const Deadline deadline = deadline_in(options_.timeout);
  send_message(socket_, attach.framed(), deadline);
  const std::string answer = receive_message(socket_, deadline);
  MessageReader reply(answer);
  if (static_cast<Reply>(reply.u8()) == Reply::refused) MT_THROW("init: ", reply.text());
  last_answer_ = Clock::now();
  thread_ = std::thread([this] { loop(); });
}

Watchdog::~Watchdog() {
  stopping_ = true;
  try {
    ++unanswered_;
    send(start_request(Request::leave));
  } catch (const Error&) {  // rank 0 is gone, and with it the need to tell it
  }
  note_terminated();  // wakes the thread
  thread_.join();
}

void Watchdog::note_terminated() noexcept {
  const char byte = stopping_ ? 's' : 't';
  [[maybe_unused]] const ssize_t n = write(wake_write_.descriptor(), &byte, 1);
}

void Watchdog::send(const MessageWriter& message) {
  const std::lock_guard lock(send_mutex_);
  send_message(socket_, message.framed(), deadline_in(options_.timeout));
}

void Watchdog::announce_failure(const std::string& text) noexcept {
  if (failing_.exchange(true)) return;
  try {
    send(start_request(Request::fail).text(options_.description + ' ' + text));
  } catch (...) {
    return;  // no rank 0: the others notice that by themselves
  }
  for (const Deadline deadline = deadline_in(1); !told_ && Clock::now() < deadline;)
    sleep_for(0.005);
  if (options_.rank == 0) sleep_for(kLastWordSeconds);
}

void Watchdog::loop() {
  const double interval = std::min(1.0, options_.timeout / 10);
  Deadline next_beat = Clock::now();
  try {
    while (!stopping_) {
      if (Clock::now() >= next_beat) {
        ++unanswered_;
        send(start_request(Request::beat).text(FlightRecorder::instance().status()));
        next_beat = deadline_in(interval);
      }
      receive(end_at_ ? std::min(next_beat, *end_at_) : next_beat);
      if (stopping_ || failing_) continue;
      check_terminated();
      check_collectives();
      check_silence();
    }
    for (const Deadline end = deadline_in(kAnswerSeconds); unanswered_ > 0 && Clock::now() < end;)
      receive(end);
  } catch (const std::exception& e) {
    told_ = true;  // nobody is left to tell
    if (stopping_ || failing_) return;
    end_process("rank 0, or the network to it, is gone (its store at " +
                options_.store.hosts.front() + " port " + std::to_string(options_.store.port) +
                ": " + e.what() + "); this rank " + FlightRecorder::instance().describe());
  }
}

void Watchdog::receive(Deadline deadline) {
  pollfd entries[] = {{socket_.descriptor(), POLLIN, 0}, {wake_read_.descriptor(), POLLIN, 0}};
  if (poll(entries, 2, poll_timeout(deadline)) <= 0) return;
  if (entries[1].revents != 0) read_wakes();
  if (entries[0].revents == 0) return;
  const std::string message = receive_message(socket_, deadline_in(options_.timeout));
  last_answer_ = Clock::now();
  handle(MessageReader(message));
}

void Watchdog::read_wakes() {
  char bytes[16];
  const ssize_t n = read(wake_read_.descriptor(), bytes, sizeof bytes);
  for (ssize_t i = 0; i < n; ++i)
    if (bytes[i] == 't' && !end_at_) end_at_ = deadline_in(kTermSeconds);
}

void Watchdog::handle(MessageReader message) {
  switch (static_cast<Reply>(message.u8())) {
    case Reply::ok: --unanswered_; return;
    case Reply::statuses:
      statuses_.emplace();
      while (!message.empty()) {
        RankStatus rank;
        rank.presence = static_cast<Presence>(message.u8());
        rank.description = message.text();
        rank.recorded = message.text();
        statuses_->push_back(std::move(rank));
      }
      return;
    case Reply::failure: {
      const std::int64_t rank = message.i64();
      const std::string text = message.text();
      told_ = true;
      if (failing_ || stopping_ || rank == options_.rank) return;
      end_process(text + "; this rank " + FlightRecorder::instance().describe());
    }
    default: MT_THROW("an unexpected answer");
  }
}

void Watchdog::check_collectives() {
  FlightRecorder& recorder = FlightRecorder::instance();
  if (const std::string error = recorder.unheard(); !error.empty()) fail(error);
  const std::optional<FlightEntry> oldest = recorder.oldest();
  if (!oldest) return;
  if (oldest->state)
    if (const std::string error = oldest->state->failure(); !error.empty())
      fail(oldest->text + ": " + error);
  const double age = std::chrono::duration<double>(Clock::now() - oldest->started).count();
  if (age < options_.timeout) return;
  statuses_.reset();
  send(start_request(Request::statuses));
  for (const Deadline end = deadline_in(kAnswerSeconds); !statuses_ && Clock::now() < end;)
    receive(end);
  fail("timeout: " + (statuses_ ? blame(*oldest, options_.rank, *statuses_)
                                : oldest->text + " has not finished, and rank 0 does not answer"));
}

void Watchdog::fail(const std::string& text) {
  failing_ = true;
  send(start_request(Request::fail).text(options_.description + ": " + text));
  for (const Deadline end = deadline_in(kAnswerSeconds); !told_ && Clock::now() < end;)
    receive(end);
  end_process(text);
}

void Watchdog::check_silence() {
  const double silence = std::chrono::duration<double>(Clock::now() - last_answer_).count();
  MT_CHECK(silence < options_.timeout, "no answer for ", options_.timeout,
           " s: its host or network is down, or it was stopped");
}

void Watchdog::check_terminated() {
  if (!end_at_ || Clock::now() < *end_at_) return;
  write_message(options_.description + ": ended by SIGTERM (its launcher or scheduler); it " +
                FlightRecorder::instance().describe());
  signal(SIGTERM, SIG_DFL);
  kill(getpid(), SIGTERM);
  sleep_for(1);
  std::_Exit(EXIT_FAILURE);
}

void Watchdog::end_process(const std::string& text) {
  write_message(options_.description + ": the run ends: " + text);
  if (options_.abort) {
    std::atomic<bool> aborted{false};
    std::thread([&] {
      try {
        options_.abort();
      } catch (...) {  // the process ends in any case
      }
      aborted = true;
    }).detach();
    for (const Deadline end = deadline_in(kAbortSeconds); !aborted && Clock::now() < end;)
      sleep_for(0.01);
  }
  if (options_.rank == 0) sleep_for(kLastWordSeconds);
  std::_Exit(EXIT_FAILURE);
}

}  // namespace mixtape::distributed
