#include "tools/mixtape/run/process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "io/text.h"

extern char** environ;

namespace mixtape::tools {
namespace {

/// The environment of this process with the changes of `spec`, as NAME=VALUE.
std::vector<std::string> environment_of(const ProcessSpec& spec) {
  std::map<std::string, std::optional<std::string>> changes;
  for (const auto& [name, value] : spec.environment) changes[name] = value;
  std::vector<std::string> variables;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string variable = *at;
    if (!changes.contains(variable.substr(0, variable.find('=')))) variables.push_back(variable);
  }
  for (const auto& [name, value] : changes)
    if (value) variables.push_back(name + "=" + *value);
  return variables;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& s : strings) result.push_back(s.data());
  result.push_back(nullptr);
  return result;
}

struct Image {
  const char* path;
  char** arguments;
  char** environment;
};

/// The child between fork and exec: calls nothing that may allocate or lock.
[[noreturn]] void become(const Image& image, const StartOptions& o, pid_t parent, int report) {
  const auto fail = [&] {
    const int error = errno;
    (void)!write(report, &error, sizeof error);
    _exit(127);
  };
  if (setpgid(0, 0) != 0 || prctl(PR_SET_PDEATHSIG, o.death_signal) != 0) fail();
  if (getppid() != parent) _exit(127);  // it died before it could be followed
  const int null = open("/dev/null", O_RDONLY);
  if (null < 0 || dup2(null, 0) < 0 || dup2(o.out, 1) < 0 || dup2(o.err, 2) < 0) fail();
  if (null > 2) close(null);
  sigprocmask(SIG_SETMASK, &o.mask, nullptr);
  execve(image.path, image.arguments, image.environment);
  fail();
  _exit(127);
}

bool is_program(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
         access(path.c_str(), X_OK) == 0;
}

/// Parent and state of a process from /proc/PID/stat, whose second field may hold anything.
std::optional<std::pair<pid_t, char>> parent_and_state(const std::filesystem::path& process) {
  std::ifstream file(process / "stat");
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;  // it has gone
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream rest(text.substr(name_end + 1));
  char state = 0;
  pid_t parent = 0;
  if (!(rest >> state >> parent)) return std::nullopt;
  return std::pair(parent, state);
}

}  // namespace

ProgramFile find_program(const std::string& name) {
  std::error_code error;
  if (name.find('/') != std::string::npos) {
    if (is_program(name)) return {.path = name};
    if (!std::filesystem::exists(name, error))
      return {.exit_code = 127, .reason = name + ": no such file"};
    return {.exit_code = 126, .reason = name + ": not an executable file"};
  }
  const char* variable = std::getenv("PATH");
  std::istringstream folders(variable != nullptr ? variable : "/usr/local/bin:/usr/bin:/bin");
  std::string found;
  for (std::string folder; !name.empty() && std::getline(folders, folder, ':');) {
    const std::string path = (folder.empty() ? "." : folder) + "/" + name;
    if (is_program(path)) return {.path = path};
    if (std::filesystem::is_regular_file(path, error)) found = path;
  }
  if (!found.empty()) return {.exit_code = 126, .reason = found + ": not an executable file"};
  return {.exit_code = 127, .reason = "'" + name + "': not found in PATH"};
}

pid_t start_process(const ProcessSpec& spec, const StartOptions& options) {
  MT_CHECK(!spec.command.empty(), "run: expected a program, got none");
  const ProgramFile file = find_program(spec.command[0]);
  if (file.exit_code != 0) throw CannotStart("cannot start " + file.reason);
  std::vector<std::string> command = spec.command, environment = environment_of(spec);
  std::vector<char*> arguments = pointers(command), variables = pointers(environment);
  const auto cannot = [&](int error) {
    return CannotStart("cannot start " + file.path + ": " + io::errno_text(error));
  };
  int report[2];  // closed by exec, or carries the error
  if (pipe2(report, O_CLOEXEC) != 0) throw cannot(errno);
  const pid_t parent = getpid(), child = fork();
  if (child == 0)
    become({file.path.c_str(), arguments.data(), variables.data()}, options, parent, report[1]);
  int error = child < 0 ? errno : 0;
  close(report[1]);
  ssize_t n = 0;
  do n = read(report[0], &error, sizeof error);
  while (n < 0 && errno == EINTR);
  close(report[0]);
  if (child > 0 && error != 0) waitpid(child, nullptr, 0);
  if (error != 0) throw cannot(error);
  return child;
}

Ending ending_of(int status, int rank) {
  if (WIFSIGNALED(status))
    return {.code = 128 + WTERMSIG(status), .signal = WTERMSIG(status), .rank = rank};
  return {.code = WEXITSTATUS(status), .rank = rank};
}

std::string describe(const Ending& e) {
  const auto named = [](int signal) {
    return detail::concat("signal ", signal, " (", strsignal(signal), ")");
  };
  std::string text = e.rank >= 0 ? detail::concat("rank ", e.rank, ": ") : "";
  if (e.signal > 0) return text + named(e.signal);
  text += detail::concat("exit code ", e.code);
  // mpirun and shells pass on in this way what ended their own children.
  if (e.code > 128 && e.code < 128 + SIGRTMIN) text += ", " + named(e.code - 128);
  return text;
}

std::vector<pid_t> descendants(pid_t root) {
  std::multimap<pid_t, std::pair<pid_t, char>> children;
  std::error_code error;
  for (std::filesystem::directory_iterator at("/proc", error), end; !error && at != end;
       at.increment(error)) {
    const std::string name = at->path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (const auto found = parent_and_state(at->path()))
      children.emplace(found->first, std::pair(static_cast<pid_t>(std::stol(name)), found->second));
  }
  MT_CHECK(!error, "run: cannot read /proc: ", error.message());
  std::vector<pid_t> found, pending{root};
  while (!pending.empty()) {
    const auto [first, last] = children.equal_range(pending.back());
    pending.pop_back();
    for (auto at = first; at != last; ++at) {
      const auto [pid, state] = at->second;
      pending.push_back(pid);
      if (state != 'Z' && state != 'X') found.push_back(pid);
    }
  }
  return found;
}

}  // namespace mixtape::tools
