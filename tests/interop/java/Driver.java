package decide;

import com.google.gson.Gson;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.util.Durations;
import com.google.rpc.ErrorInfo;
import decideonce.v1.DecisionServiceGrpc;
import decideonce.v1.DecisionServiceGrpc.DecisionServiceBlockingStub;
import decideonce.v1.DecisionServiceOuterClass.DecideRequest;
import decideonce.v1.DecisionServiceOuterClass.DecideResponse;
import decideonce.v1.DecisionServiceOuterClass.GetDecisionStatusRequest;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthGrpc;
import io.grpc.protobuf.StatusProto;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** The interop driver: reads commands as JSON lines, WORKERS at a time on a connection each, answers with JSON lines. */
public final class Driver {
  private static final String TOKEN = System.getenv("DECIDEONCE_TOKEN");
  private static final Gson GSON = new Gson();

  private Driver() {}

  public static void main(String[] arguments) throws IOException, InterruptedException {
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    List<Thread> workers = new ArrayList<>();
    for (int i = 0; i < Integer.parseInt(arguments[0]); i++) {
      Thread worker = new Thread(() -> work(lines));
      worker.start();
      workers.add(worker);
    }
    for (Thread worker : workers) {
      worker.join();
    }
  }

  private static void work(BufferedReader lines) {
    try {
      ManagedChannel channel = Decide.connect();
      String line;
      while ((line = lines.readLine()) != null) {
        JsonObject command = JsonParser.parseString(line).getAsJsonObject();
        Map<String, Object> answer;
        try {
          answer = run(channel, command);
        } catch (StatusRuntimeException error) {
          answer = failed(error);
        }
        answer.put("id", command.get("id").getAsInt());
        System.out.println(GSON.toJson(answer));
      }
      channel.shutdownNow();
    } catch (Exception defect) {
      defect.printStackTrace();
      System.exit(1);
    }
  }

  private static Map<String, Object> run(Channel channel, JsonObject command) throws Exception {
    byte[] request = Base64.getDecoder().decode(command.get("request").getAsString());
    Receiving receiving = new Receiving();
    DecisionServiceBlockingStub stub =
        Decide.authorized(DecisionServiceGrpc.newBlockingStub(channel), TOKEN).withInterceptors(receiving);
    switch (command.get("do").getAsString()) {
      case "decide" -> {
        DecideResponse answer = stub.decide(DecideRequest.parseFrom(request));
        Map<String, Object> said = said(answer);
        said.put("replayed", answer.getReplayed());
        said.put("raw", receiving.text());
        return said;
      }
      case "status" -> {
        var answer = stub.getDecisionStatus(
            GetDecisionStatusRequest.parseFrom(request));
        Map<String, Object> said = said(DecideResponse.parseFrom(answer.toByteString()));
        said.put("raw", receiving.text());
        return said;
      }
      case "finish" -> {
        long withinMs = Math.round(command.get("within_s").getAsDouble() * 1000);
        return said(Decide.finish(channel, TOKEN, ByteString.copyFrom(request), withinMs));
      }
      case "health" -> {
        var asked = HealthCheckRequest.parseFrom(request);
        Map<String, Object> said = new HashMap<>();
        said.put("code", 0);
        said.put("status", HealthGrpc.newBlockingStub(channel).check(asked).getStatus().name());
        return said;
      }
      default -> throw new IllegalArgumentException(command.get("do").getAsString());
    }
  }

  private static Map<String, Object> said(DecideResponse answer) {
    Map<String, Object> said = new HashMap<>();
    said.put("code", 0);
    said.put("status", answer.getStatus().name());
    said.put("outcome", answer.getDecision().getOutcome());
    said.put("decision_id", answer.getProvenance().getDecisionId());
    said.put("reason", answer.getFailure().getReason());
    said.put("retry_after_ms", Durations.toMillis(answer.getRetryAfter()));
    return said;
  }

  private static Map<String, Object> failed(StatusRuntimeException error) throws InvalidProtocolBufferException {
    Map<String, Object> answer = new HashMap<>();
    answer.put("code", error.getStatus().getCode().value());
    answer.put("message", String.valueOf(error.getStatus().getDescription()));
    for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
      if (detail.is(ErrorInfo.class)) {
        ErrorInfo info = detail.unpack(ErrorInfo.class);
        answer.put("error",
            Map.of("reason", info.getReason(), "domain", info.getDomain(), "metadata", info.getMetadataMap()));
      }
    }
    return answer;
  }

  /** Keeps the bytes of the answer as they came. */
  private static final class Receiving implements ClientInterceptor {
    private byte[] data;

    String text() {
      return Base64.getEncoder().encodeToString(data);
    }

    @Override
    public <Q, A> ClientCall<Q, A> interceptCall(MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
      MethodDescriptor.Marshaller<A> marshaller = new MethodDescriptor.Marshaller<>() {
        @Override
        public InputStream stream(A answer) {
          return method.streamResponse(answer);
        }

        @Override
        public A parse(InputStream stream) {
          try {
            data = stream.readAllBytes();
          } catch (IOException error) {
            throw new UncheckedIOException(error);
          }
          return method.parseResponse(new ByteArrayInputStream(data));
        }
      };
      return next.newCall(method.toBuilder(method.getRequestMarshaller(), marshaller).build(), options);
    }
  }
}
